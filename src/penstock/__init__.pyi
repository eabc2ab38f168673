from penstock.client import Client as Client
from penstock.client import SyncClient as SyncClient

__version__: str
