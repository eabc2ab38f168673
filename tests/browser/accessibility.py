"""Labels, contrast and focus of a page: what axe-core's rules look for, as far as a page like ours
can break them.

`problems(page)` lists what is wrong with what is shown now. `focus_problems(page)` walks through the
page with Tab and lists what has the focus without showing it.
"""

from typing import Any

CHECK = r"""() => {
  const problems = [];
  const visible = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true })
    && element.getBoundingClientRect().width > 1;
  const shown = (element) => element.outerHTML.slice(0, 120);

  // Names
  const named = (element) => {
    const by = element.getAttribute("aria-labelledby");
    const text = element.getAttribute("aria-label") || (by && document.getElementById(by)?.textContent)
      || [...(element.labels ?? [])].map((label) => label.textContent).join(" ")
      || (element.matches("input, select, textarea") ? element.title : element.textContent) || element.title
      || element.querySelector("img[alt]:not([alt=''])")?.alt;
    return Boolean(text && text.trim());
  };
  for (const element of document.querySelectorAll("a[href], button, input, select, textarea, summary, dialog, nav, [role=img]")) {
    if (visible(element) && !named(element) && element.getAttribute("aria-hidden") !== "true") problems.push(`no name: ${shown(element)}`);
  }
  for (const image of document.querySelectorAll("img:not([alt])")) problems.push(`no alt: ${shown(image)}`);
  for (const chart of document.querySelectorAll("svg:not([aria-hidden]):not([role=img])")) problems.push(`svg is neither hidden nor an image: ${shown(chart)}`);

  // Structure
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of ids.filter((id, i) => ids.indexOf(id) !== i)) problems.push(`id twice: ${id}`);
  if (document.querySelectorAll("h1").length !== 1) problems.push(`${document.querySelectorAll("h1").length} h1`);
  if (!document.documentElement.lang) problems.push("no language");
  if (!document.title) problems.push("no title");
  if (document.querySelectorAll("main").length !== 1) problems.push("not one main");
  for (const table of document.querySelectorAll("table")) {
    if (!table.caption && !table.getAttribute("aria-label")) problems.push(`no caption: ${shown(table)}`);
  }
  for (const cell of document.querySelectorAll("th")) if (!cell.textContent.trim() && !cell.querySelector("[aria-label]")) problems.push(`empty header: ${shown(cell)}`);
  for (const element of document.querySelectorAll("[aria-current=''], [tabindex]")) if (Number(element.getAttribute("tabindex")) > 0) problems.push(`tabindex: ${shown(element)}`);
  for (const list of document.querySelectorAll("ul, ol")) for (const child of list.children) if (child.tagName !== "LI") problems.push(`not an item: ${shown(child)}`);
  for (const outer of document.querySelectorAll("a a, button button, a button, button a")) problems.push(`nested: ${shown(outer)}`);

  // Contrast
  const numbers = (colour) => { const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], [r2, g2, b2]) => [r * a + r2 * (1 - a), g * a + g2 * (1 - a), b * a + b2 * (1 - a), 1];
  const background = (element) => {
    const layers = [];
    for (let node = element; node; node = node.parentElement) {
      const colour = numbers(getComputedStyle(node).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((value) => { const part = value / 255; return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const element = walker.currentNode.parentElement;
    if (!text || !visible(element) || element.closest("[disabled], option, noscript, .hidden, .skip")) continue;
    const style = getComputedStyle(element);
    const below = background(element);
    const colour = over(numbers(style.color), below);
    const [bright, dark] = [light(colour), light(below)].sort((a, b) => b - a);
    const ratio = (bright + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) problems.push(`contrast ${ratio.toFixed(2)}: ${text.slice(0, 40)} in ${shown(element)}`);
  }
  return problems;
}"""

FOCUS = """() => {
  const element = document.activeElement;
  if (!element || element === document.body) return null;
  const style = getComputedStyle(element);
  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  return { shown: seen || element.matches("main"), text: element.outerHTML.slice(0, 120) };
}"""


def problems(page: Any) -> list[str]:
    return list(page.evaluate(CHECK))


def focus_problems(page: Any, steps: int = 25) -> list[str]:
    """What is reached by Tab and does not show it; "nothing" when Tab reaches nothing."""
    result, reached = [], 0
    for _ in range(steps):
        page.keyboard.press("Tab")
        focus = page.evaluate(FOCUS)
        if focus is not None:
            reached += 1
            if not focus["shown"]:
                result.append(f"focus is not visible: {focus['text']}")
    return result if reached else ["nothing can be reached with Tab"]
