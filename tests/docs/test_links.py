"""Links of the docs lead somewhere, to the very heading, and the site is built of them without a
word from elsewhere.
"""

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify
from playwright.sync_api import TimeoutError as NotFoundInTime
from playwright.sync_api import sync_playwright

from tests.docs.tools import ROOT

OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md"]
CHROMIUM = os.environ.get("PENSTOCK_TEST_CHROMIUM") or shutil.which("chromium")
TYPED_TIMES, FOUND_MILLISECONDS = 12, 10_000


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    collected = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        path = page.parent / name if name else page
        in_page = anchor and path.suffix == ".md"  # of a picture it names the theme
        if not path.exists() or (in_page and anchor not in anchors(path)):
            collected.append(target)
    return collected


def without_code(text: str) -> str:
    return re.sub(r"^(```+).*?^\1$", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    text = without_code(page.read_text())
    headings = [re.sub(r"[`*]", "", one) for one in re.findall(r"^#+ (.+)$", text, re.M)]
    named = re.findall(r"\{#([\w-]+)\}|id=\"([\w-]+)\"", text)
    return {slugify(one, "-") for one in headings} | {one for pair in named for one in pair}


def test_links_lead_to_pages_and_to_their_headings() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *OUTSIDE]
    assert len(pages) > 50
    assert {page.name: links for page in pages if (links := broken(page))} == {}


def test_tests_that_the_docs_name_exist() -> None:
    for page in [*(ROOT / "docs").rglob("*.md"), *OUTSIDE]:
        if "decisions" not in page.parts:
            for name in re.findall(r"\btests/[\w/]+\.py\b", page.read_text()):
                assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_a_link_to_a_missing_heading_is_broken(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `x`\n\n[1](#one-x) [2](#two) [3](page.md#one-x) [4](other.md)\n")
    assert broken(page) == ["#two", "other.md"]


@pytest.mark.timeout(500)
def test_the_site_is_built_and_asks_nobody(tmp_path: Path) -> None:
    built = subprocess.run(
        ["make", "docs", f"SITE={tmp_path / 'site'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link[^>]*\shref=\"?([^\" >]+)", text)
        assert [one for one in loaded if re.match(r"(https?:)?//", one)] == [], page.name
    assert (tmp_path / "site/search/search_index.js").read_text().startswith("var __index")
    if CHROMIUM:
        search_from_disk(tmp_path / "site/reference/queues.html")


def search_from_disk(page: Path) -> None:
    """What a reader types is found, and nothing comes from elsewhere."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1300, "height": 900})
        requests: list[str] = []
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(page.as_uri(), timeout=120_000)
        for _ in range(TYPED_TIMES):  # what is typed before the scripts listen is not heard
            tab.fill("input.md-search__input", "")
            tab.click("input.md-search__input")
            tab.keyboard.type("dead letter")
            with suppress(NotFoundInTime):
                tab.wait_for_selector(".md-search-result__link", timeout=FOUND_MILLISECONDS)
                break
        assert tab.locator(".md-search-result__link").count() > 5
        assert [url for url in requests if not url.startswith("file:")] == []
        browser.close()
