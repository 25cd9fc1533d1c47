"""Hadoop's configuration files and Java classes on this machine."""

import os
import shutil
import subprocess
from xml.etree import ElementTree


def hadoop_properties(file: str | os.PathLike[str]) -> dict[str, str]:
    """Return the properties in one of Hadoop's configuration files.

    Raises
    ------
    OSError, xml.etree.ElementTree.ParseError
        If the file cannot be read.
    """
    root = ElementTree.parse(file).getroot()
    return {
        (each.findtext("name") or "").strip(): (each.findtext("value") or "").strip()
        for each in root.iter("property")
    }


def find_hadoop_classes() -> None:
    """Set ``CLASSPATH`` to Hadoop's Java classes, which libhdfs needs."""
    home = os.environ.get("HADOOP_HOME")
    hadoop = os.path.join(home, "bin", "hadoop") if home else shutil.which("hadoop")
    if os.environ.get("CLASSPATH") or not hadoop or not os.path.exists(hadoop):
        return
    listing = subprocess.run([hadoop, "classpath", "--glob"], capture_output=True, text=True)
    if listing.returncode == 0:
        os.environ["CLASSPATH"] = listing.stdout.strip()
