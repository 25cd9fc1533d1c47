"""Import paths of BigDL 2.x's ``dllib`` that programs for Orca and Friesian use."""

from bigdl.common.dropped import explain_imports

explain_imports()
