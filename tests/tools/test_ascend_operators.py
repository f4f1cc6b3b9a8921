"""An operator counts as torch_npu's only if its whole schema stands in a library of the wheel."""

import zipfile
from pathlib import Path

from tools.ascend.operators import unconfirmed, wanted


def test_only_whole_schemas_in_libraries_count(tmp_path: Path):
    schemas = [
        "npu_a(Tensor x) -> Tensor",
        "npu_b(Tensor x, float eps=1e-6) -> Tensor",
        "npu_c(Tensor x) -> Tensor",
    ]
    wheel = tmp_path / "torch_npu-0.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "torch_npu/lib/a.so", b"\0" + schemas[0].encode() + b"\0npu_b(Tensor x) -> Tensor\0"
        )
        archive.writestr("torch_npu/docs.py", schemas[2])
        archive.writestr("torch_npu/lib/b.so", b"\0no_" + schemas[2].encode() + b"\0")
    assert unconfirmed(wheel, schemas) == schemas[1:]


def test_there_are_schemas_each_once():
    names = [schema.partition("(")[0] for schema in wanted()]
    assert len(set(names)) == len(names) >= 14
