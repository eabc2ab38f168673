"""One typed configuration, from defaults < YAML < environment < flags."""

from penstock.config.load import Loaded, build, load, show
from penstock.config.schema import Config

__all__ = ["Config", "Loaded", "build", "load", "show"]
