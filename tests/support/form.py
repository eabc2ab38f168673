"""Which form of a test runs: the short one (`make test-fast`), the usual one (`make test`) or the
long one (`make soak`). A form says how often something is tried, never what is asserted.
"""

import os
from typing import TypeVar

SHORT = os.environ.get("TEST_FORM") == "short"
SOAK = os.environ.get("PENSTOCK_SOAK") == "1"

T = TypeVar("T")


def pick(*, short: T, usual: T, soak: T) -> T:
    """The one for the form that runs."""
    return soak if SOAK else short if SHORT else usual
