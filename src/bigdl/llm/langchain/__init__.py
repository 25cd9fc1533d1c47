"""Classes for LangChain, with the names of `bigdl.llm.langchain` of 2.4."""
