"""LocalStore under several processes, against a plain model. The nightly profile runs many more steps."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from machines.machine import LocalStoreMachine, TightStoreMachine


@pytest.mark.parametrize("machine", [LocalStoreMachine, TightStoreMachine])
def test_several_processes_against_a_model(machine: type[LocalStoreMachine], monkeypatch: pytest.MonkeyPatch) -> None:
    nightly = settings().max_examples > 100
    if nightly:
        monkeypatch.setattr(machine, "most_kills", 100)
    fewer = settings(max_examples=settings().max_examples // 2, stateful_step_count=100 if nightly else 25)
    try:
        run_state_machine_as_test(machine, settings=fewer)
    finally:
        machine.end_processes()
