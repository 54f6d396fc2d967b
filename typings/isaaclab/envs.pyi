# Isaac Lab publishes no types, and its own stubs name modules that pyright can then not read.
from typing import Any

def __getattr__(name: str) -> Any: ...
