"""Accessibility of a page: axe-core's rules, and whether the focus is visible.

`problems(page)` lists what axe-core reports for the page as it is now. `focus_problems(page)` walks
through the page with Tab and lists the elements that have the focus and do not show it.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

AXE = Path(sys.prefix, "axe-core", "node_modules", "axe-core", "axe.min.js")
COLOURS = ["color-contrast", "link-in-text-block"]  # the rules that depend on the colour scheme
RUN = """async (rules) => {
  const options = { resultTypes: ["violations"], ...(rules && { runOnly: rules }) };
  const { violations } = await axe.run(document, options);
  return violations.flatMap(({ id, help, nodes }) =>
    nodes.map(({ html, any }) => `${id}: ${help}: ${html.slice(0, 200)} ${any.map(({ message }) => message).join("; ")}`));
}"""
FOCUS = """() => {
  const element = document.activeElement;
  if (!element || element === document.body) return null;
  const style = getComputedStyle(element);
  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  return { shown: seen || element.matches("main"), text: element.outerHTML.slice(0, 120) };
}"""


def problems(page: Any, rules: list[str] | None = None) -> list[str]:
    """Return axe-core's violations: the rule, the element and the reason. None: of all rules."""
    if not AXE.exists():
        pytest.skip("needs axe-core: tools/test-programs installs it")
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    return list(page.evaluate(RUN, rules))


def focus_problems(page: Any, steps: int = 25) -> list[str]:
    """Return the elements that Tab reaches and that do not show the focus."""
    result, reached = [], 0
    for _ in range(steps):
        page.keyboard.press("Tab")
        focus = page.evaluate(FOCUS)
        if focus is not None:
            reached += 1
            if not focus["shown"]:
                result.append(f"focus is not visible: {focus['text']}")
    return result if reached else ["nothing can be reached with Tab"]
