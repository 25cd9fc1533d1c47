"""Type annotations: the number of Any must not rise."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "count_any.py"

# The numbers that were reached: lower them when there are fewer. The goal of results is 150.
RESULTS = 308
PARAMETERS = 445


def test_no_more_values_are_any_than_there_were():
    spec = importlib.util.spec_from_file_location("count_any", SCRIPT)
    count_any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(count_any)
    results, parameters = count_any.count()
    assert results.total() <= RESULTS, "a function returns Any: give its result a type"
    assert parameters.total() <= PARAMETERS, "a parameter is Any: give it a type"
