"""Search spaces under the import path of the BigDL 2.0 paper (Fig. 4)."""

from bigdl.nano.automl.hpo.space import *  # noqa: F403
from bigdl.nano.automl.hpo.space import __all__ as __all__
