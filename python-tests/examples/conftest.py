"""The folders of the examples, from which a program imports the modules beside it.

They are known before Spark starts, so that its Python workers find these modules too.
"""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
ORCA = EXAMPLES / "orca"

sys.path[:0] = [str(ORCA), str(ORCA / "ncf"), str(EXAMPLES / "nano"), str(EXAMPLES / "friesian")]
sys.path.insert(0, str(EXAMPLES / "llm"))
sys.path.insert(0, str(EXAMPLES / "applications"))
