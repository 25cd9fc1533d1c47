"""How a pipeline learns: in passes over the data, each of which answers all questions it can.

A step can ask as soon as the columns that it asks about are computed by steps that have learned.
Those that cannot wait for the next pass, and steps behind them that read their columns too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.friesian.feature.pipeline.requests import Request
from bigdl.friesian.feature.pipeline.step import Fitted, Schema, State, Step

__all__ = ["Ask", "Program", "learn"]


@dataclass(frozen=True)
class Ask:
    """Questions of one step, to be answered about the columns as they are at its place.

    Attributes
    ----------
    step : int
        Place of the step in the pipeline.
    requests : dict of str to Request
    """

    step: int
    requests: dict[str, Request]


Program = list[Fitted | Ask]


def learn(
    steps: Sequence[Step],
    schema: Schema,
    answer: Callable[[Program], dict[tuple[int, str], Any]],
) -> list[Fitted]:
    """Find the states of all steps.

    Parameters
    ----------
    steps : list of Step
    schema : dict of str to Field
        Of the data.
    answer : callable
        Runs a program over the data and returns the answers by the place of the step and the name
        of the request.

    Returns
    -------
    list of Fitted
    """
    states: dict[int, State] = {}
    while True:
        program, fitted = _program(steps, schema, states)
        asks = [each for each in program if isinstance(each, Ask)]
        if not asks:
            return fitted
        answers = answer(program)
        for each in asks:
            mine = {name: answers[each.step, name] for name in each.requests}
            before = fitted[each.step].before
            states[each.step] = steps[each.step].settled(before, mine)


def _program(
    steps: Sequence[Step], schema: Schema, states: dict[int, State]
) -> tuple[Program, list[Fitted]]:
    """What the next pass computes and asks, and the steps as far as they can be bound."""
    program: Program = []
    fitted: list[Fitted] = []
    unknown: set[str] = set()
    for place, step in enumerate(steps):
        if not step.is_row_wise and any(isinstance(each, Ask) for each in program):
            break  # what was asked is about the rows before this step
        requests = {} if place in states else step.requests(schema)
        if not requests and place not in states:
            states[place] = step.settled(schema, {})
        state = states.get(place)
        each = Fitted(step, schema, state)
        fitted.append(each)
        is_known = state is not None and not unknown.intersection(each.inputs)
        asked = {name for request in requests.values() for name in request.columns}
        if is_known:
            program.append(each)
        elif requests and not asked & unknown:
            program.append(Ask(place, requests))
        if state is None and step.hides_columns(schema):
            break
        cells = step.cells(schema, state)
        unknown = (unknown - {cell.output for cell in cells}) | {
            cell.output for cell in cells if not is_known or unknown.intersection(cell.inputs)
        }
        schema = step.after(schema, state)
    return program, fitted
