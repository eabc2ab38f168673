from penstock.client import *  # noqa: F403 - what it exports, we export

__version__: str
