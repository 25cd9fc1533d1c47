"""Conversion of language models for the CPU: ``llm_convert`` and ``llm-convert`` of 2.4."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError
from bigdl.llm.model import TextModel

FAMILIES = ("llama", "bloom", "gptneox", "starcoder", "chatglm")
_PRECISIONS = ("int4", "int8")


def llm_convert(
    model: str | os.PathLike,
    outfile: str | os.PathLike,
    model_family: str,
    outtype: str = "int4",
    model_format: str = "pth",
    **kwargs: object,
) -> str:
    """Convert a decoder to int4 or int8 weights, and return the folder of the result.

    Open the folder with :class:`~bigdl.llm.TextModel` or ``llm-cli``.

    Parameters
    ----------
    model : str or Path
        Folder with the files of a Hugging Face model.
    outfile : str or Path
        Folder in which the folder of the result is created.
    model_family : {"llama", "bloom", "gptneox", "starcoder", "chatglm"}
        Part of the name of the result; the model's files say what it is.
    outtype : {"int4", "int8"}
    model_format : {"pth"}
    **kwargs
        Accepted; they have no effect.

    Raises
    ------
    UsageError
        If the model cannot be converted, or is in the format ``"gptq"``.

    Examples
    --------
    >>> from bigdl.llm import llm_convert
    >>> llm_convert("SmolLM2", "converted", model_family="llama")  # doctest: +SKIP
    'converted/bigdl_llm_llama_int4'
    """
    check_choice("model_family", model_family, FAMILIES)
    check_choice("outtype", outtype, _PRECISIONS)
    if model_format != "pth":
        raise UsageError(
            f"model_format={model_format!r} is not supported; pass the folder of the original "
            "model with model_format='pth'",
            code="unsupported",
            argument="model_format",
        )
    folder = Path(outfile, f"bigdl_llm_{model_family}_{outtype}")
    TextModel(model, outtype, task="generate").save(folder)
    return str(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``llm-convert``."""
    parser = argparse.ArgumentParser(
        prog="llm-convert", description="Convert a language model to int4 or int8 weights."
    )
    parser.add_argument("model", help="folder of a Hugging Face model")
    parser.add_argument("-o", "--outfile", required=True, help="folder for the result")
    parser.add_argument("-x", "--model-family", required=True, choices=FAMILIES)
    parser.add_argument("-f", "--model-format", default="pth", choices=["pth", "gptq"])
    parser.add_argument("-t", "--outtype", default="int4", choices=_PRECISIONS)
    options = parser.parse_args(arguments)
    try:
        print(
            llm_convert(
                options.model,
                options.outfile,
                options.model_family,
                options.outtype,
                options.model_format,
            )
        )
    except UsageError as error:
        print(f"llm-convert: {error}", file=sys.stderr)
        return 1
    return 0
