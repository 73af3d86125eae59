"""Entry point of vLLM's general plugins; loaded in every vLLM process of this environment."""


def register() -> None:
    """Nothing to register yet."""
