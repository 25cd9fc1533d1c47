"""Command line of the package."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from bigdl.common.errors import UsageError

from . import links, report
from .published import fit_inception
from .validate import Calibration, calibrated, check, predictions

CALIBRATION = Path(__file__).with_name("calibration.json")
LINKS = Path(__file__).with_name("links.json")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scaling", description=__doc__)
    parser.add_argument("command", choices=["calibrate", "curves"])
    parser.add_argument("--calibration", type=Path, default=CALIBRATION, metavar="PATH")
    parser.add_argument("--links", type=Path, default=LINKS, metavar="PATH")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the rounds that count")
    parser.add_argument("--iterations", type=int, default=200, help="of every simulated run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chart", type=Path, metavar="PATH", help="draw the curves, too")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the curves there, too")
    options = parser.parse_args(argv)
    try:
        if options.command == "calibrate":
            calibrate(options)
        else:
            curves(options)
    except UsageError as error:
        raise SystemExit(str(error)) from None


def calibrate(options) -> None:
    """Measure, save the calibration, and report its prediction errors."""
    from .calibrate import measured

    measured(seconds=options.seconds).save(options.calibration)
    print(f"measured runs are in {options.calibration}")
    validated(Calibration.load(options.calibration))


def curves(options) -> None:
    """Print the curves, if the simulation is validated."""
    calibration = Calibration.load(options.calibration)
    fits = validated(calibration)
    model = fit_inception(fits["shuffle"].costs, calibration.jitter)
    exchanges = links.Exchanges.load(options.links)
    costs = links.costs_of(exchanges)
    if missed := links.check(exchanges, costs):
        raise UsageError("; ".join(missed))
    simulated = report.curves(
        model,
        {
            "barrier": fits["barrier"].costs,
            "overlap": costs["during the backward pass"],
            "overlap-halving": costs["halving and doubling"],
        },
        iterations=options.iterations,
        seed=options.seed,
    )
    report.print_curves(simulated, model)
    if options.chart:
        report.chart(simulated, options.chart)
    if options.json:
        options.json.write_text(json.dumps({"simulated": asdict(simulated)}, indent=1))


def validated(calibration: Calibration) -> dict:
    """Return the fits of both transports, if they predict the held-out points."""
    fits = {name: calibrated(calibration, name) for name in ("shuffle", "barrier")}
    predicted = predictions(calibration, fits)
    for table in (report.fits_table(fits), report.predictions_table(predicted)):
        print("\n".join(table), end="\n\n")
    check(predicted)
    return fits


if __name__ == "__main__":
    main()
