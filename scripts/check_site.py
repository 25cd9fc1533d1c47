#!/usr/bin/env python3
"""Check the links, layout, contrast, scripts and search of the built pages.

python scripts/check_site.py docs/_build/html

Links and anchors between pages are checked in any case. The rest needs a Chromium, playwright's own
(`playwright install --with-deps --only-shell chromium`) or the program that BIGDL_BROWSER names: no
page is wider than a telephone, no listing is cut on a usual screen, texts have enough contrast in
light and in dark, no script fails, and the search finds a method and an error code. Without a
browser it says so and leaves these out.
"""

import argparse
import functools
import http.server
import os
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

WIDTH = 390
"""Pixels of a narrow telephone."""
CONTRAST = 4.5, 3.0
"""Least ratio of contrast for texts and for large texts, by WCAG 2, AA."""
SCREEN = 1280
"""Pixels of a usual screen, on which no listing is cut."""
SEARCHES = {
    "Estimator.fit": "#bigdl.orca.learn.pytorch.PyTorchEstimator.fit",
    "data-null": "guides/troubleshooting.html",
}
"""What is typed, and the end of a link that must be among the first five results."""

# Returns texts that are hard to read, each with its ratio of contrast.
FAINT_TEXTS = """
([normal, large]) => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const known = new Map();
  const parse = (colour) => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      known.set(colour, Array.from(canvas.getImageData(0, 0, 1, 1).data));
    }
    return known.get(colour);
  };
  const over = (front, back) => {
    const alpha = front[3] / 255;
    return [0, 1, 2].map((i) => front[i] * alpha + back[i] * (1 - alpha));
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.map((value) => {
      const part = value / 255;
      return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      layers.push(parse(getComputedStyle(at).backgroundColor));
    }
    return layers.reduceRight((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const faint = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    if (!element.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
    const style = getComputedStyle(element), back = ground(element);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    const both = [luminance(over(parse(style.color), back)), luminance(back)];
    const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    const key = `${style.color} on ${back.map(Math.round)}`;
    if (ratio < (isLarge ? large : normal)) {
      faint.set(key, `${ratio.toFixed(1)} (${key}): ${text.slice(0, 40)}`);
    }
  }
  return Array.from(faint.values());
}
"""
# Returns what reaches beyond the right edge and is in no scrollable box.
WIDE_PARTS = """
() => {
  const edge = document.documentElement.clientWidth + 1;
  const parts = [];
  const visit = (element) => {
    for (const child of element.children) {
      const right = child.getBoundingClientRect().right;
      const scrolls = ["auto", "scroll"].includes(getComputedStyle(child).overflowX);
      if ((scrolls && right <= edge) || !child.checkVisibility()) continue;
      const before = parts.length;
      visit(child);
      if (before === parts.length && right > edge) {
        const text = child.textContent.trim().slice(0, 50);
        parts.push(`<${child.tagName}> to ${Math.round(right)}: ${text}`);
      }
    }
  };
  visit(document.querySelector("article"));
  return parts.slice(0, 4);
}
"""


# Returns the listings that a reader must scroll, each with its pixels and its longest line.
CUT_LISTINGS = """
() => Array.from(document.querySelectorAll("div.highlight pre"))
  .filter((pre) => pre.scrollWidth > pre.clientWidth + 1)
  .map((pre) => {
    const lines = pre.innerText.split("\\n");
    const longest = lines.reduce((one, other) => (other.length > one.length ? other : one), "");
    return `${pre.scrollWidth - pre.clientWidth} pixels: ${longest.trim().slice(0, 60)}`;
  })
"""


class Page(HTMLParser):
    """Parser of the links and anchors of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the ids and links of an element."""
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    """Return a message for every link to a missing file or anchor."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists():
                reason = "there is no such file"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                reason = "the page has no such anchor"
            else:
                continue
            broken.append(f"{path.relative_to(site.resolve())}: link to {link}: {reason}")
    return broken


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Request handler that serves files without logging."""

    def log_message(self, *arguments: object) -> None:
        """Suppress the log line of a request."""


def look(browser, site: Path, address: str) -> list[str]:
    """Return a message for every problem that a browser shows.

    Parameters
    ----------
    browser : playwright.sync_api.Browser
    site : Path
    address : str
        Where the site is served.
    """
    wrong: list[str] = []

    def note_error(error) -> None:
        wrong.append(f"a script failed: {error}")

    def note_request(request) -> None:
        if request.failure != "net::ERR_ABORTED":  # not because the next page was opened
            wrong.append(f"{request.url} cannot be fetched")

    pages = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    for scheme in ("light", "dark"):
        size = {"width": WIDTH, "height": 844}
        tab = browser.new_page(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        tab.on("pageerror", note_error)
        tab.on("requestfailed", note_request)
        for page in pages:
            tab.goto(f"{address}/{page}")
            texts = tab.evaluate(FAINT_TEXTS, list(CONTRAST))
            wrong += [f"{page}: hard to read in {scheme}: {text}" for text in texts]
            parts = tab.evaluate(WIDE_PARTS) if scheme == "light" else []
            wrong += [f"{page}: wider than {WIDTH} pixels: {part}" for part in parts]
        tab.close()
    tab = browser.new_page(viewport={"width": SCREEN, "height": 900})
    for page in pages:
        tab.goto(f"{address}/{page}")
        cut = tab.evaluate(CUT_LISTINGS)
        wrong += [f"{page}: a listing is cut on a screen of {SCREEN}: {each}" for each in cut]
    for typed, expected in SEARCHES.items():
        tab.goto(f"{address}/index.html")
        tab.fill("input[name=q]", typed)
        tab.press("input[name=q]", "Enter")
        tab.wait_for_selector("#search-results li a")
        tab.wait_for_timeout(2000)  # results come one after the other
        links = tab.eval_on_selector_all(
            "#search-results li a", "links => links.map((link) => link.getAttribute('href'))"
        )
        # a highlighted word is part of the address
        addresses = [link.split("?")[0] for link in links[:5]]
        if "#" not in expected:  # anywhere on the page
            addresses = [address.partition("#")[0] for address in addresses]
        if not any(address.endswith(expected) for address in addresses):
            wrong.append(f"the search for {typed} gives first {links[:5]}")
    tab.close()
    return wrong


def look_in_browser(site: Path) -> tuple[list[str], str]:
    """Return the problems in a browser, and its name or why none was started."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        return [], "playwright is not installed, so nothing was looked at in a browser"
    handler = functools.partial(QuietHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with sync_playwright() as playwright:
            try:
                browser = playwright.chromium.launch(
                    executable_path=os.environ.get("BIGDL_BROWSER"), args=["--no-sandbox"]
                )
            except Error as error:
                reason = str(error).splitlines()[0]
                return [], f"no browser starts, so nothing was looked at in one: {reason}"
            wrong = look(browser, site, f"http://127.0.0.1:{server.server_port}")
            name = f"Chromium {browser.version}, {WIDTH} pixels, light and dark, search"
            browser.close()
            return wrong, name
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    """Print all problems; exit with an error if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, help="folder of the built pages")
    site = parser.parse_args().site
    if not (site / "index.html").exists():
        sys.exit(f"{site} holds no built pages; run: make docs")
    wrong = broken_links(site)
    seen, browser = look_in_browser(site)
    wrong += seen
    print("\n".join([*wrong, f"links and anchors; {browser}"]))
    if wrong:
        sys.exit(f"{len(wrong)} faults of the pages")


if __name__ == "__main__":
    main()
