# tensordict publishes no types, and its own stubs name classes that pyright can then not find.
from typing import Any

def __getattr__(name: str) -> Any: ...
