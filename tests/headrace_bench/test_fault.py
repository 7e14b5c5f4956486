from __future__ import annotations

from headrace_bench.fault import Fault, Misuse


def test_a_fault_is_one_line() -> None:
    assert str(Fault("no server:\n  connection   refused")) == "no server: connection refused"


def test_the_exit_status_says_whose_fault_it_is() -> None:
    assert Fault("the server went away").status == 1
    assert Misuse("--rate x: give a number").status == 2
    assert Fault("stopped", status=130).status == 130
