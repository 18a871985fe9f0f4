"""The tables of the protocol: what they allow is written once, and all of it can come about."""

from __future__ import annotations

import pytest

from fednet.errors import LocalProtocolError
from fednet.protocol import table
from fednet.protocol.table import ClientState, ClientTaskState, TaskState, WorkerState

# The first state of each is the one in which it begins.
TABLES = {
    "A client process": table.CLIENT,
    "A task at the client": table.CLIENT_TASK,
    "A client process at the server": table.WORKER,
    "A task at the server": table.TASK,
}
ENDS = {
    "A client process": {ClientState.OVER},
    "A task at the client": {ClientTaskState.GONE},
    "A client process at the server": {WorkerState.GONE},
    "A task at the server": {TaskState.DONE, TaskState.DROPPED},
}


def reached(states, start) -> set:
    """The states that can follow a state, itself among them."""
    found = set()
    new = {start}
    while new:
        found |= new
        new = {to for s in new for following in states[s].values() for to in following} - found
    return found


@pytest.mark.parametrize("name", TABLES)
def test_every_state_can_be_reached_and_an_end_from_each(name):
    states = TABLES[name]
    start = next(iter(states))
    assert reached(states, start) == set(type(start))
    assert all(ENDS[name] & reached(states, state) for state in states)


@pytest.mark.parametrize("name", TABLES)
def test_every_event_is_in_the_table_and_leads_nowhere_else(name):
    states = TABLES[name]
    start = next(iter(states))
    events = type(next(iter(states[start])))
    assert {event for row in states.values() for event in row} == set(events)
    for state in type(start):
        for event in events:
            following = states[state].get(event, ())
            for to in type(start):
                if to in following:
                    assert table.step(states, state, event, to) is to
                else:
                    with pytest.raises(
                        LocalProtocolError, match=f"cannot lead from '{state.value}"
                    ):
                        table.step(states, state, event, to)
