"""What is written of a rank when a run is lost."""

import json
import threading

import torch

from k31fn.parallel import Mesh
from k31fn.parallel.backends.processes import CollectiveProgress
from k31fn.trainer.ranks import failure_report


def test_step_times_are_counted_by_powers_of_two():
    times = failure_report.StepTimes()
    for seconds in (0.3, 0.4, 0.499, 0.5, 0.9, 7.0):
        times.add(seconds)
    assert times.as_json() == {
        "counts": {"below 0.5 s": 3, "below 1 s": 2, "below 8 s": 1},
        "longest": 7.0,
    }


def test_the_record_of_a_rank(tmp_path):
    progress, inside, leave = CollectiveProgress(), threading.Event(), threading.Event()
    progress.begin("psum", ("tp",), torch.zeros(2, 3))

    def waits_in_a_collective():
        inside.set()
        leave.wait()

    thread = threading.Thread(target=waits_in_a_collective, name="worker")
    thread.start()
    inside.wait()
    mesh = Mesh(pp=2, tp=2)
    record = failure_report.describe(
        "rank 1 died", 3, mesh, progress, failure_report.StepTimes(), torch.device("cpu")
    )
    leave.set()
    thread.join()
    assert failure_report.write(tmp_path / "failure", record)
    read = json.loads((tmp_path / "failure" / "rank-3.json").read_text())
    assert read["at"] == {"pp": 1, "tp": 1}
    assert read["why"] == "rank 1 died"
    assert any("waits_in_a_collective" in line for line in read["stacks"]["worker"])
    assert any("test_the_record_of_a_rank" in line for line in read["stacks"]["MainThread"])
    assert read["memory_bytes"]["host_peak"] >= 1e7
    (entry,) = read["collectives"]
    assert {k: entry[k] for k in ("number", "kind", "axes", "shape", "dtype", "waited")} == {
        "number": 1,
        "kind": "psum",
        "axes": ["tp"],
        "shape": [2, 3],
        "dtype": "float32",
        "waited": None,
    }


def test_what_cannot_be_written_is_no_second_failure(tmp_path):
    (tmp_path / "file").write_text("")
    assert not failure_report.write(tmp_path / "file", {"rank": 0})
