"""Search spaces under the name that the BigDL 2.0 paper gives them (Fig. 4)."""

from bigdl.nano.automl.hpo.space import *  # noqa: F403
from bigdl.nano.automl.hpo.space import __all__ as __all__
