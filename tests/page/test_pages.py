"""The pages of `sparkis ui` in a real Chromium, at a server whose jobs change all the time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from compat.conformance.servers import sparkis_server
from compat.conformance.wire import Connection, requests
from compat.page.browser import LAPTOP, PHONE, has_chromium, page_of
from compat.page.world import (
    CARRIERS,
    CONTROLS,
    DECIMALS,
    FIELDS,
    JSON,
    LARGE,
    MANY_FIELDS,
    MARKUP,
    PLAYERS,
    SCRIPT,
    Writer,
)
from compat.waiting import eventually
from tests.page.conftest import Site
from tests.page.site import Tab

pytestmark = pytest.mark.skipif(not has_chromium(), reason="there is no chromium with its chromedriver on the PATH")

# Each page, and words that it shows of this server's jobs.
PAGES = {
    "/overview": "flights",
    "/browse": "found by",
    "/browse?job=game": "game:top:monday",
    "/watch?key=weather:maxTemperature:JFK&key=flights:golden:UA": "changes seen",
    "/cluster": "This server is alone",
    "/slow": "sparkis-ui",
    "/shadow": "it compares nothing",
    "/history?key=weather:maxTemperature:JFK": "the oldest at the left",
    "/key?key=flights:golden:UA": "meanDelay",
    "/sign-in": "as a user of the Redis endpoint",
}
SMALL_PHONE = (320, 640)
# What would be drawn outside of a phone's or a laptop's window.
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(autouse=True)
def tidy(tab: Tab) -> Iterator[None]:
    """Each test begins with a light laptop, and ends without a complaint of the browser."""
    tab.show_as()
    tab.complaints()
    yield
    assert tab.complaints() == []


@pytest.mark.parametrize("path", PAGES)
def test_each_page_shows_jobs_to_laptops_and_phones_and_loads_nothing_from_elsewhere(tab: Tab, path: str) -> None:
    tab.requested()
    for size, theme in ((LAPTOP, "light"), (PHONE, "dark"), (SMALL_PHONE, "light")):
        tab.show_as(size, theme)
        tab.open(path)
        tab.wait_for(PAGES[path])
        assert tab.js(OVERFLOW) == 0
    hosts = {re.sub(r"^\w+://|/.*", "", each) for each in tab.requested() if not each.startswith(("data:", "chrome"))}
    assert hosts == {tab.url.partition("//")[2]}


def test_page_updates_without_reload_and_lists_stale_jobs_first(tab: Tab) -> None:
    tab.open("/overview")
    tab.js("window.sameDocument = true")
    assert tab.texts("table.jobs .badge")[:2] == ["stale", "stale"]
    assert tab.text("h1 + .badge") == "2 of 5 jobs to look at"
    before = tab.cell("flights", "Epoch")
    eventually(lambda: tab.cell("flights", "Epoch"), lambda found: found != before, "the next epoch of a job")
    eventually(
        lambda: tab.js("return document.querySelector('.graph .line')?.getAttribute('d').split(' ').length"),
        lambda n: n > 3,
    )
    assert tab.js("return window.sameDocument")


def test_key_is_found_by_job_state_and_pattern_and_keyboard(tab: Tab) -> None:
    tab.open("/overview")
    tab.press("2")
    tab.wait_for("Browse", "h1")
    tab.choose("job", "flights")
    tab.wait_for("flights:*")
    tab.press("/")
    tab.press("flights:golden:*" + Keys.ENTER)
    tab.wait_for("flights:golden:UA", ".keys")
    assert sorted(tab.texts(".keys code")) == [f"flights:golden:{each}" for each in sorted(CARRIERS)]
    tab.browser.find_element(By.LINK_TEXT, "hash\nflights:golden:UA").click()
    assert tab.wait_for("meanDelay", ".pairs")
    assert "key=flights%3Agolden%3AUA" in tab.browser.current_url
    tab.press("?")
    assert "next page" in tab.wait_for("Keys", "dialog")


def test_hash_has_pages_and_filter(tab: Tab) -> None:
    tab.open(f"/key?key={MANY_FIELDS.decode()}")
    tab.wait_for(f"{FIELDS:,}", ".tiles")
    first = tab.texts(".pairs td:first-child")
    assert 20 < len(first) < FIELDS
    tab.press("n")
    eventually(lambda: tab.texts(".pairs td:first-child"), lambda found: found and set(found).isdisjoint(first))
    tab.press("/")
    tab.press("-4321" + Keys.ENTER)
    eventually(lambda: tab.texts(".pairs td"), lambda found: found == ["field-4321", "4321"], "the field")


def test_sorted_set_is_ranked(tab: Tab) -> None:
    tab.open("/key?key=game:top:monday")
    eventually(lambda: len(tab.texts(".ranks tbody tr")), lambda count: count == len(PLAYERS))
    widths = [
        float(each)
        for each in tab.js("return [...document.querySelectorAll('.bar rect')].map(e => e.getAttribute('width'))")
    ]
    assert widths == sorted(widths, reverse=True) and widths[0] == 100


def test_json_stays_unfolded_while_its_time_to_live_counts_down(tab: Tab) -> None:
    tab.open(f"/key?key={JSON.decode()}")
    assert "deep" not in tab.wait_for("null", ".json-root")
    tab.find(".json-root details details details summary").click()
    seen: set[str] = set()
    eventually(lambda: seen.add(tab.texts(".tile strong")[2]) or len(seen), lambda count: count > 2, "another second")
    assert all(re.fullmatch(r"[12]:\d\d:\d\d", each) for each in seen)
    assert "deep" in tab.text(".json-root")


def test_watched_keys_change_without_reload(tab: Tab) -> None:
    tab.open("/watch?key=weather:maxTemperature:JFK&key=game:top:monday&pattern=weather:latest:*")
    tab.wait_for("weather:latest:EWR")
    tab.js("window.sameDocument = true")
    seen: set[str] = set()
    eventually(lambda: seen.add(tab.text(".big strong")) or len(seen), lambda count: count > 3, "another value")
    assert tab.js("return window.sameDocument")
    assert tab.js("return document.querySelectorAll('.card svg .line').length") > 5
    eventually(lambda: tab.texts(".events li"), lambda found: len(found) > 3, "notifications")
    tab.find(".card a[aria-label='Watch no longer']").click()
    tab.wait_for("Watch", "h1")
    assert "maxTemperature" not in tab.browser.current_url


def test_name_of_watched_number_with_many_digits_stays_readable_on_phone(tab: Tab) -> None:
    tab.show_as(PHONE)
    tab.open(f"/watch?key={DECIMALS.decode()}")
    tab.wait_for("8.0756", ".card")
    assert tab.js("return document.querySelector('.card .name code').getClientRects().length") <= 2
    assert tab.find(".card td.n").get_attribute("title") == "8.075596816976127"


@pytest.mark.parametrize("page", ["key", "history", "watch"])
@pytest.mark.parametrize("key", [MARKUP, CONTROLS], ids=["markup", "controls"])
def test_hostile_keys_and_values_are_only_text(tab: Tab, key: bytes, page: str) -> None:
    tab.open(f"/{page}?key={quote(key)}")
    tab.wait_for({"key": "Time to live", "history": "epoch", "watch": "string"}[page], "#live")
    shown = eventually(lambda: tab.text("main"), lambda found: "gnp.exe" in found or "hacked" in found)
    if key == MARKUP:
        assert SCRIPT in shown
    else:
        assert r"odd:values:\x00\x1b[31m\x0d\x0a\xff\xfe" in tab.texts(".title h1, .card h2 code, .crumbs a")
        assert r"\x00\x01\x1b]0;title\x07\xff \u202e gnp.exe" in shown
    assert not tab.js("return window.hacked")
    assert tab.js("return document.querySelectorAll('main script, main img').length") == 0


def test_hostile_keys_are_found_and_opened(tab: Tab) -> None:
    tab.open("/browse?job=odd")
    links = {
        each.text.partition("\n")[2]: each.get_attribute("href")
        for each in tab.browser.find_elements(By.CSS_SELECTOR, ".keys a")
    }
    assert f"odd:values:{SCRIPT}" in links
    tab.browser.get(links[r"odd:values:\x00\x1b[31m\x0d\x0a\xff\xfe"])
    tab.wait_for("gnp.exe")
    tab.open("/key?key=odd:fields:markup")
    tab.wait_for(SCRIPT, ".pairs")
    assert not tab.js("return window.hacked")


def test_forms_send_hostile_keys_back_unchanged(tab: Tab) -> None:
    tab.open(f"/watch?key={quote(CONTROLS)}")
    tab.wait_for("gnp.exe", ".cards")
    tab.press("/")
    tab.press("game:top:monday" + Keys.ENTER)
    tab.wait_for("grace", ".cards")
    tab.wait_for("gnp.exe", ".cards")
    tab.open(f"/history?key={quote(CONTROLS)}")
    tab.find(".search button").click()
    eventually(lambda: "count=50" in tab.browser.current_url, awaited="the form")
    tab.wait_for("gnp.exe", ".timeline")


def test_value_of_five_megabytes_is_shown_page_at_a_time(tab: Tab) -> None:
    tab.open(f"/key?key={LARGE.decode()}")
    tab.wait_for("5,242,880", ".tiles")
    assert len(tab.browser.page_source) < 50_000
    tab.press("n")
    eventually(lambda: "at=" in tab.browser.current_url, awaited="the next page")
    assert tab.wait_for("0123456789abcdef", "pre.value")


def test_rate_of_user_is_that_of_its_clients(tab: Tab, site: Site) -> None:
    tab.open("/slow")
    with Connection(site.server.port) as client:
        ping = requests([[b"PING"]] * 2_000)

        def rate() -> str:
            client.send(ping)
            for _ in range(2_000):
                client.read()
            return tab.text("#user-default td:nth-child(4)")

        eventually(rate, lambda found: found.endswith(" k"), "a rate of thousands")


def test_chosen_theme_stays(tab: Tab) -> None:
    tab.open("/slow")
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = tab.js(ground)
    tab.press("t")
    dark = tab.js(ground)
    assert dark != light
    tab.open("/overview")
    assert tab.js(ground) == dark
    tab.press("t")
    assert tab.js(ground) == light


def test_lines_to_copy_are_those_of_key(tab: Tab, site: Site) -> None:
    tab.open("/key?key=flights:golden:UA")
    tab.find(".code summary").click()
    url = f"redis://127.0.0.1:{site.server.port}"
    assert tab.text(".copy code") == f"redis-cli -u {url} HGETALL flights:golden:UA"
    tab.browser.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": tab.url},
    )
    tab.find("[data-copy]").click()
    tab.wait_for("Copied", "[data-copy]")
    assert tab.browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == tab.text(
        ".copy code"
    )


def test_page_without_clipboard_copies_too(tab: Tab) -> None:
    tab.open("/key?key=flights:golden:UA")
    tab.js("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as over plain http elsewhere
    tab.find(".code summary").click()
    tab.find("[data-copy]").click()
    tab.wait_for("Copied", "[data-copy]")
    tab.press("/")
    tab.press(Keys.CONTROL + "v")
    assert tab.find("[data-search]").get_attribute("value") == tab.text(".copy code")


def test_lost_endpoint_is_shown_until_it_is_back(tab: Tab, folder: Path) -> None:
    Writer(folder / "log").close()
    with ExitStack() as page, ExitStack() as first:
        server = first.enter_context(sparkis_server(folder / "store", folder / "log"))
        other = Tab(tab.browser, page.enter_context(page_of(f"redis://127.0.0.1:{server.port}")))
        other.open("/overview")
        other.wait_for("payments")
        other.js("window.sameDocument = true")
        first.close()
        other.wait_for(f"redis://127.0.0.1:{server.port} does not answer", "[role=alert]")
        assert "payments" in other.text("table.jobs")  # the last facts stay
        with sparkis_server(folder / "store", folder / "log", port=server.port):
            eventually(lambda: other.text("#live [role=alert]"), lambda found: not found, "the page to recover")
            other.wait_for("payments")
            assert other.js("return window.sameDocument")
        page.close()
        other.wait_for("The program of this page does not answer", "#away")
