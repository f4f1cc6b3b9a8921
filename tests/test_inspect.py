"""Counts of parameters and bytes: the published numbers exactly, and small models against tensors
that are there.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from k31fn import config, inspect, model, params, random, tree
from tests import small

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
VISION = 401_214_464 + 46_144_512


@functools.cache
def summary(name):
    return inspect._summarise(config.load(CONFIGS / f"{name}.py"))


@pytest.mark.parametrize(
    ("name", "total", "active", "text"),
    [
        ("k3", 2_779_484_393_568 + VISION, 104_189_530_208, ("2,779.93B", "104.19B")),
        ("k31_pro", 2_779_662_919_776 + VISION, 104_368_056_416, ("2,780.11B", "104.37B")),
    ],
)
def test_published_totals(name, total, active, text):
    found = summary(name)
    assert (found.total, found.active) == (total, active)
    assert sum(found.parts.values()) == total
    lines = inspect._render(found).splitlines()
    for label, number in zip(("total", "active per token"), text, strict=True):
        assert next(line for line in lines if line.strip().startswith(label)).endswith(number)


def test_published_parts():
    """Per layer: KDA 443,740,384, Gated MLA 232,196,096, indexer 7,438,592; per expert
    33,030,144.
    """
    parts = summary("k31_pro").parts
    assert parts["KDA"] == 69 * 443_740_384
    assert parts["full attention"] == 24 * 232_196_096
    assert parts["indexer"] == 24 * 7_438_592
    assert parts["routed experts"] == 92 * 896 * 33_030_144
    assert parts["shared experts"] == 92 * 3 * 7168 * 6144
    assert parts["dense MLP"] == 3 * 7168 * 33792
    assert parts["router"] == 92 * 7168 * 896
    assert parts["latent projections"] == 92 * (2 * 7168 * 3584 + 3584)
    assert parts["AttnRes"] == (2 * 93 + 1) * 2 * 7168
    assert parts["norms"] == (2 * 93 + 1) * 7168
    assert parts["head"] == parts["embedding"] == 163840 * 7168
    assert (parts["vision tower"], parts["projector"]) == (401_214_464, 46_144_512)
    assert "indexer" not in summary("k3").parts


def test_hyper_connections_are_named():
    """Of each of two sublayers of four layers, and of the end: by the specs of the scheme alone."""
    cfg = config.load(CONFIGS / "tiny_mhc.py")
    parts = inspect._summarise(cfg).parts
    specs = model.specs(cfg)
    mixes = [mix for layer in specs.layers for mix in (layer.attn_mix, layer.ffn_mix)]
    assert parts["mHC"] == sum(params.count(mix) for mix in (*mixes, specs.final_mix))
    assert "AttnRes" not in parts
    assert "mHC" not in summary("k31_pro").parts


def test_active_by_definition():
    """Without the embedding table and with 2 of 8 experts, counted on a model built that way."""
    cfg = config.load(CONFIGS / "tiny.py")
    few = small.replace(cfg, moe=dataclasses.replace(cfg.sublayers["moe"], num_experts=2, top_k=1))
    router_rows = 3 * 128 * (8 - 2)
    assert (
        inspect._summarise(cfg).active == params.count(model.specs(few)) - 264 * 128 + router_rows
    )


def test_bytes_against_tensors():
    """The tiny model as it is: weights, and what the optimisers would hold for each of its
    tensors.
    """
    cfg = config.load(CONFIGS / "tiny.py")
    specs = model.specs(cfg)
    weights = params.init(specs, random.key(0))
    found = inspect._summarise(cfg)
    for dtype in (torch.bfloat16, torch.float32):
        assert found.weight_bytes[dtype] == sum(
            x.nbytes for x in tree.leaves(weights) if x.dtype == dtype
        )
    masters = [x.float() for x in tree.leaves(weights) if x.dtype == torch.bfloat16]
    moments = [torch.zeros_like(x, dtype=torch.float32) for x in tree.leaves(weights)]
    one = sum(x.nbytes for x in moments)
    assert found.gradient_bytes == one
    assert found.adamw_bytes == sum(x.nbytes for x in masters) + 2 * one
    matrices = params.select(weights, specs, lambda _, spec: "matrix" in spec.tags)
    assert found.muon_bytes == found.adamw_bytes - 4 * sum(x.numel() for x in matrices.values())


def test_frozen_weights_have_no_state(monkeypatch):
    cfg = config.load(CONFIGS / "tiny.py")
    before = inspect._summarise(cfg)
    specs = model.specs(cfg)
    frozen = dataclasses.replace(specs.head, tags=frozenset({"frozen"}))
    monkeypatch.setattr(model, "specs", lambda _: dataclasses.replace(specs, head=frozen))
    after = inspect._summarise(cfg)
    size = 264 * 128
    assert before.gradient_bytes - after.gradient_bytes == 4 * size
    assert (
        before.adamw_bytes - after.adamw_bytes == before.muon_bytes - after.muon_bytes == 12 * size
    )
    assert after.weight_bytes == before.weight_bytes


def test_nothing_is_allocated():
    class NoTensors(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} ran")

    with NoTensors():
        inspect._render(inspect._summarise(config.load(CONFIGS / "k31_pro_reduced_npu.py")))


def test_layers():
    found = summary("k31_pro")
    assert inspect._pattern(found.attention) == "23 x (KDA KDA KDA DSA), DSA"
    assert inspect._pattern(found.ffn) == "dense, 92 x MoE"
    assert found.opens == (0, 12, 24, 36, 48, 60, 72, 84)
    assert inspect._pattern(summary("k3").attention) == "23 x (KDA KDA KDA MLA), MLA"
    text = inspect._render(found)
    assert "93: 69 KDA, 24 DSA; 1 dense, 92 MoE" in text
    assert "open at layers 0, 12, 24, 36, 48, 60, 72, 84" in text


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ("", ""),
        ("a", "a"),
        ("aa", "2 x a"),
        ("abab", "2 x (a b)"),
        ("aaab", "3 x a, b"),
        ("abcd", "a, b, c, d"),
        ("aabaabb", "2 x (a a b), b"),
    ],
)
def test_pattern(kinds, text):
    assert inspect._pattern(tuple(kinds)) == text


class TestCommand:
    def test_it_runs_anywhere(self, tmp_path):
        command = [sys.executable, "-m", "k31fn.inspect", str(CONFIGS / "k31_pro.py")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "2,780.11B" in done.stdout
        assert "104.37B" in done.stdout

    def test_a_run_is_shown_by_its_config_or_folder(self, capsys, tmp_path):
        run = tmp_path / "tiny" / "20260101-120000"
        run.mkdir(parents=True)
        recipe = config.load_recipe(CONFIGS / "tiny.py")
        (run / "config.json").write_text(json.dumps(config.to_dict(recipe)))
        assert inspect.main([str(CONFIGS / "tiny.py")]) == 0
        shown = capsys.readouterr().out
        for path in (run / "config.json", run, run.parent):
            assert inspect.main([str(path)]) == 0
            assert capsys.readouterr().out == shown
        assert inspect.main([str(tmp_path)]) == 2
        assert "neither a run folder nor a folder of runs" in capsys.readouterr().err

    def test_errors_are_one_line(self, capsys, tmp_path):
        wrong = tmp_path / "wrong.py"
        wrong.write_text("")
        for path, message in (
            (CONFIGS / "k31.py", "does not exist"),
            (wrong, "defines no model()"),
        ):
            assert inspect.main([str(path)]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert err.startswith("k31fn.inspect: config file")
            assert message in err
            assert err.count("\n") == 1


class TestOnAMesh:
    @pytest.mark.slow
    def test_what_a_rank_holds_and_sends(self, capsys):
        """The rows of the table, and in them sizes that follow by hand."""
        path = str(CONFIGS / "tiny.py")
        assert (
            inspect.main(
                [path, "--mesh.fsdp", "2", "--mesh.tp", "2", "--mesh.ep", "2", "--batch-size", "8"]
            )
            == 0
        )
        lines = capsys.readouterr().out.splitlines()
        lines = lines[next(i for i, text in enumerate(lines) if text.startswith("mesh ")) :]

        def line(start):
            return next(text for text in lines if text.strip().startswith(start))

        assert line("mesh ").split()[1:] == [
            "fsdp",
            "2",
            "x",
            "tp",
            "2",
            "=",
            "4",
            "ranks,",
            "ep",
            "2",
        ]
        assert line("fsdp ").split()[:2] == ["fsdp", "splits"]
        assert 99.9 <= float(line("fsdp ").split()[2].rstrip("%")) <= 100
        table = (
            264 * 128 // 4 * 4
        )  # a quarter of the embedding, in float32; AdamW has two moments of it
        assert line("embedding  ").split()[1::2] == [f"{n * table / 1e3:.2f}" for n in (1, 1, 2)]
        experts = (
            3 * 3 * 8 * 64 * 96 // 4 * 4
        )  # three layers, three matrices each; Muon has one momentum
        assert line("routed experts  ").split()[2::2][-3:] == [f"{experts / 1e3:.2f}"] * 3
        assert line("layers.1.ffn.experts.w_gate").split("->") == [
            f"  {'layers.1.ffn.experts.w_gate':<40}{'[8, 64, 96]':>22} ",
            f" {'[2, 64, 96]':<22} (tp*fsdp, -, -)",
        ]
        assert any(text.split()[:2] == ["all_gather", "fsdp"] for text in lines)
        assert any(text.split()[:2] == ["ragged_all_to_all", "tp"] for text in lines)

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.slow
    def test_stages(self, capsys):
        assert (
            inspect.main([str(CONFIGS / "tiny.py"), "--mesh.pp", "2", "--micro-batches", "2"]) == 0
        )
        out = capsys.readouterr().out
        assert "bytes of a rank of stage rank" in out
        assert "send                  pp" in out
        assert "recv                  pp" in out

    @pytest.mark.slow
    def test_one_rank_sends_nothing(self, capsys):
        assert (
            inspect.main([str(CONFIGS / "tiny.py"), "--optimizer", "adamw", "--length", "32"]) == 0
        )
        out = capsys.readouterr().out
        assert "mesh        one rank" in out
        assert out.rstrip().endswith("\n  nothing")

    def test_a_mesh_that_does_not_fit(self, capsys):
        assert inspect.main([str(CONFIGS / "k31_pro.py"), "--mesh.tp", "5"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(
            "k31fn.inspect: mesh.tp=5 does not divide model.kda.num_heads=96, model.full_attention."
        )
        assert err.endswith("; nearest: 4\n")
        assert (
            inspect.main([str(CONFIGS / "tiny.py"), "--mesh.fsdp", "63", "--batch-size", "63"]) == 2
        )
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("k31fn.inspect: mesh.fsdp=63 splits 0.0% of the parameters: ")
        assert err.endswith("; nearest: mesh.fsdp 48, 64, 96\n")

    @pytest.mark.slow
    def test_the_full_model(self):
        """Every rank of a stage holds a 128th of its experts, in float32.

        In a process without the type checks.
        """
        mesh = ["--mesh.fsdp", "64", "--mesh.tp", "2", "--mesh.pp", "4", "--mesh.ep", "32"]
        command = [sys.executable, "-m", "k31fn.inspect", str(CONFIGS / "k31_pro.py"), *mesh]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True
        )
        assert "= 512 ranks, ep 32" in done.stdout
        lines = done.stdout[done.stdout.index("bytes of a rank") :].splitlines()
        (experts,) = (text.split() for text in lines if text.startswith("  routed experts"))
        assert float(experts[2]) == pytest.approx(23 * 896 * 33_030_144 * 4 / 128 / 1e9, rel=1e-3)
