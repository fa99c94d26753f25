"""The page over HTTP, without a browser: users, foreign pages, and what it asks the endpoint for."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from compat.conformance.certificates import Authority
from compat.conformance.servers import Running, free_port, has_redis, redis_server, sparkis_server
from compat.conformance.wire import Connection
from compat.page.browser import page_of
from compat.processes import killed_at_end
from compat.waiting import WAIT_S_MAX, eventually
from sparkis_ui.app import SIGN_IN_CODE
from sparkis_ui.values import SCAN_STEPS_MAX
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.model.slots import slot_of
from tests.builders import put_value, write_log
from tests.server.commands import Start
from tests.server.conftest import start as start
from tests.server.nodes import HALVES, Nodes
from tests.server.overlay import Overlay

USERS = """\
user default off
user admin on >admin-secret ~* &* +@all
user viewer on >viewer-secret ~* &* +@read +@connection +info -@admin +slowlog|get +latency|latest +client|list
user reader on >reader-secret ~cars:speed:* +@read +@connection +info -@admin
"""
STATES = (StateDescriptor("speed", key="car", value="kmh"), StateDescriptor("price", key="car", value="eur"))
# The parameters of each page.
PARAMETERS = {
    "/overview": ("sort",),
    "/browse": ("job", "state", "pattern", "cursor"),
    "/watch": ("key", "pattern"),
    "/slow": ("user",),
    "/history": ("key", "count"),
    "/key": ("key", "at", "filter"),
}
# So many keys that a page of keys cannot have looked at all of them.
KEYS = 50_000


@dataclass
class Site:
    """A page, and the server that it shows."""

    url: str
    server: Running

    def client(self) -> httpx.Client:
        """Return a browser without a session."""
        return httpx.Client(base_url=self.url, headers={"Origin": self.url.rstrip("/")}, timeout=WAIT_S_MAX)

    def signed_in(self, user: str, password: str) -> httpx.Client:
        """Return a browser that has signed in."""
        client = self.client()
        assert client.post("/sign-in", data={"username": user, "password": password}).status_code == 303
        return client


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The page of a server with users."""
    folder = tmp_path_factory.mktemp("users")
    (folder / "log").mkdir()
    (folder / "users.acl").write_text(USERS)
    with LogWriter(folder / "log", "cars", STATES) as writer:
        writer.publish(Change("speed", Op.PUT, b"cars:speed:%d" % n, value=b"%d" % n) for n in range(KEYS))
        writer.publish([Change("price", Op.PUT, b"cars:price:7", value=b"9999")])
    options = ("--aclfile", str(folder / "users.acl"))
    with sparkis_server(folder / "store", folder / "log", *options, is_loaded=False) as server:
        with server.connect() as admin:
            admin.call("AUTH", "admin", "admin-secret")
            eventually(lambda: admin.call("DBSIZE").plain, lambda found: found == KEYS + 1, processes=[server.process])
        with page_of(f"redis://127.0.0.1:{server.port}") as url:
            yield Site(url, server)


def test_unsigned_user_is_redirected_to_form_and_back(site: Site) -> None:
    client = site.client()
    asked = client.get("/key?key=cars%3Aspeed%3A7")
    assert asked.status_code == 303
    form = client.get(asked.headers["location"])
    assert 'name="to" value="/key?key=cars%3Aspeed%3A7"' in form.text
    to = "/key?key=cars%3Aspeed%3A7"
    done = client.post("/sign-in", data={"username": "admin", "password": "admin-secret", "to": to})
    assert (done.status_code, done.headers["location"]) == (303, to)
    assert "<strong" in client.get("/overview").text


@pytest.mark.parametrize("to", ["https://evil.example", "//evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_signing_in_leads_to_no_other_site(site: Site, to: str) -> None:
    done = site.client().post("/sign-in", data={"username": "admin", "password": "admin-secret", "to": to})
    assert done.headers["location"] == "/"


def test_wrong_password_is_refused_and_not_repeated(site: Site) -> None:
    client = site.client()
    refused = client.post("/sign-in", data={"username": "admin", "password": "wrong-one"})
    assert refused.status_code == 403
    assert "invalid username-password pair" in refused.text and "wrong-one" not in refused.text
    assert not client.cookies


def test_session_is_cookie_that_no_script_and_no_other_site_gets(site: Site) -> None:
    client = site.client()
    cookie = client.post("/sign-in", data={"username": "admin", "password": "admin-secret"}).headers["set-cookie"]
    assert "secret" not in cookie
    assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
    assert client.get("/overview").status_code == 200
    assert client.post("/sign-out").status_code == 303
    assert client.get("/overview").status_code == 303
    name, value = cookie.split(";")[0].split("=", 1)
    assert httpx.get(f"{site.url}/overview", cookies={name: value}).status_code == 303


def test_page_shows_each_user_its_permitted_keys(site: Site) -> None:
    admin, reader = site.signed_in("admin", "admin-secret"), site.signed_in("reader", "reader-secret")
    assert "9999" in admin.get("/key?key=cars%3Aprice%3A7").text
    assert "9999" not in (refused := reader.get("/key?key=cars%3Aprice%3A7").text)
    assert "No permissions to access a key" in refused
    assert ">7</pre>" in reader.get("/key?key=cars%3Aspeed%3A7").text
    assert "cars:price" not in reader.get("/browse?pattern=cars:price:*").text.partition('class="keys"')[2]
    assert "Some of this is refused: " in reader.get("/slow").text
    assert "Some of this is refused: " not in site.signed_in("viewer", "viewer-secret").get("/slow").text


@pytest.mark.parametrize(
    ("user", "key", "kind"),
    [
        ("admin", "cars:speed:11", "string"),
        ("admin", "cars:speed:missing", "no key"),
        ("reader", "cars:price:11", "not read"),
    ],
)
def test_watched_key_has_no_kind_until_it_was_read(site: Site, user: str, key: str, kind: str) -> None:
    client = site.signed_in(user, f"{user}-secret")

    def text_of_page() -> str:
        found = re.search(
            r'<p class="hint"><span class="kind [^"]*">([^<]*)</span>', client.get(f"/watch?key={key}").text
        )
        assert found is not None
        return found[1]

    assert text_of_page() == "reading…"  # the page does not wait for the read
    eventually(text_of_page, lambda found: found == kind, kind)


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
@pytest.mark.parametrize("path", ["/overview", "/static/ui.js", "/sign-in", "/nothing"])
def test_other_names_and_foreign_pages_are_refused_everywhere(site: Site, path: str, headers: dict[str, str]) -> None:
    answer = site.client().get(path, headers=headers)
    assert answer.status_code == 403
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_foreign_page_cannot_sign_in_or_out(site: Site) -> None:
    client = site.signed_in("admin", "admin-secret")
    for path in ("/sign-in", "/sign-out"):
        assert client.post(path, headers={"Origin": "https://evil.example"}).status_code == 403
        assert httpx.post(site.url + path).status_code == 403
    assert client.get("/overview").status_code == 200


def test_sockets_are_for_this_page_and_signed_in_users(site: Site) -> None:
    live = site.url.replace("http", "ws").rstrip("/") + "/live/overview"
    with pytest.raises(InvalidStatus):
        connect(live, origin="https://evil.example")
    with pytest.raises(InvalidStatus):
        connect(live)
    with connect(live, origin=site.url.rstrip("/")) as socket, pytest.raises(ConnectionClosed) as closed:
        socket.recv(WAIT_S_MAX)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == SIGN_IN_CODE
    cookies = site.signed_in("admin", "admin-secret").cookies
    headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
    with connect(live, origin=site.url.rstrip("/"), additional_headers=headers) as socket:
        assert "job-cars" in socket.recv(WAIT_S_MAX)


def test_long_forms_and_urls_are_answered(site: Site) -> None:
    client = site.client()
    assert client.post("/sign-in", data={"username": "admin", "password": "x" * 100_000}).status_code == 403
    assert client.get("/watch?" + "&".join(["key=a"] * 200)).status_code == 303


@pytest.mark.parametrize("value", ["%FF%FE%00", "²", "9" * 5000, "99999999999999999999", "[", "a" * 10_000, "%"])
def test_url_may_have_any_bytes(site: Site, value: str) -> None:
    client = site.signed_in("admin", "admin-secret")
    for path, names in PARAMETERS.items():
        for name in names:
            others = "" if name == "key" else "&key=cars%3Aspeed%3A7"
            assert (path, name, client.get(f"{path}?{name}={value}{others}").status_code) == (path, name, 200)


def calls(site: Site) -> dict[str, int]:
    """Return how often each command was called."""
    with site.server.connect() as admin:
        admin.call("AUTH", "admin", "admin-secret")
        found = re.findall(r"cmdstat_(\S+):calls=(\d+)", admin.call("INFO", "commandstats").plain.decode())
    return {name: int(count) for name, count in found}


def named_in(admin: Connection, category: str) -> set[str]:
    """Return the commands of a category of ACL."""
    return {each.decode() for each in admin.call("ACL", "CAT", category).plain}


def test_search_for_keys_among_many_sends_scan_only(site: Site) -> None:
    client = site.signed_in("admin", "admin-secret")
    client.get("/browse?pattern=none")
    before = calls(site)
    page = client.get("/browse?pattern=cars:price:*").text
    spent = {name: count - before.get(name, 0) for name, count in calls(site).items() if count > before.get(name, 0)}
    # The others are those of new connections, the polls of this page and of earlier ones, and those of this test.
    with site.server.connect() as admin:
        admin.call("AUTH", "admin", "admin-secret")
        of_keys = {
            name for name in named_in(admin, "read") | named_in(admin, "keyspace") if not name.startswith("state|")
        }
    assert of_keys & set(spent) <= {"scan", "type"}
    assert 1 <= spent["scan"] <= SCAN_STEPS_MAX
    pages = 1
    while "cars:price:7" not in page and (found := re.search(r'rel="next" href="([^"]+)"', page)):
        page = client.get(found[1].replace("&amp;", "&")).text
        pages += 1
    assert "cars:price:7" in page
    assert pages <= 2 + KEYS / 10_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_page_with_line(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "sparkis", "ui", "--url", f"redis://127.0.0.1:{free_port()}", "--port", "0"]
    with killed_at_end(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        assert page.stdout.readline().endswith("; Ctrl-C ends it\n")
        page.send_signal(number)
        assert page.communicate(timeout=WAIT_S_MAX) == ("", "ended\n")
        assert page.returncode == 0


def test_both_sides_may_have_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    cert, key = authority.issue("page")
    (tmp_path / "log").mkdir()
    options = ("--port", "0", *authority.options("node", auth_clients="yes"))
    with ExitStack() as stack:
        server = stack.enter_context(sparkis_server(tmp_path / "store", tmp_path / "log", *options, is_loaded=False))
        given = (*authority.options("client"), "--page-cert-file", str(cert), "--page-key-file", str(key))
        url = stack.enter_context(page_of(f"rediss://127.0.0.1:{server.tls_port or server.port}", *given))
        client = stack.enter_context(httpx.Client(base_url=url, verify=authority.context(), timeout=WAIT_S_MAX))
        assert url.startswith("https://")
        shown = eventually(lambda: client.get("/overview").text, lambda found: "No jobs yet" in found, "the server")
        assert f"rediss://127.0.0.1:{server.tls_port or server.port}" in shown


def test_node_of_cluster_shows_keys_of_all_nodes(tmp_path: Path) -> None:
    keys = [b"cars:speed:%d" % number for number in range(8)]
    with ExitStack() as stack:
        nodes = Nodes(tmp_path, stack, *HALVES)
        writer = stack.enter_context(LogWriter(nodes.log, "cars", STATES))
        writer.publish(Change("speed", Op.PUT, key, value=b"first") for key in keys)
        first, _ = nodes.start(0), nodes.start(1)
        assert {slot_of(key) < 8192 for key in keys} == {True, False}
        url = stack.enter_context(page_of(f"redis://127.0.0.1:{first.port}"))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=WAIT_S_MAX))

        def all_pages(path: str) -> str:
            text = client.get(path).text
            found = re.search(r'rel="next" href="([^"]+)"', text)
            return text + (all_pages(found[1].replace("&amp;", "&")) if found else "")

        eventually(lambda: [key for key in keys if key.decode() not in all_pages("/browse")], lambda left: not left)
        watched = "/watch?" + "&".join(f"key={key.decode()}" for key in keys)
        eventually(lambda: client.get(watched).text.count(">first<"), lambda count: count == len(keys), "all values")
        writer.publish(Change("speed", Op.PUT, key, value=b"second") for key in keys)
        eventually(lambda: client.get(watched).text.count(">second<"), lambda count: count == len(keys), "all changes")
        for key in keys:
            assert ">second<" in client.get(f"/key?key={key.decode()}").text


def test_cluster_shows_zones_of_its_servers(tmp_path: Path, start: Start) -> None:
    with ExitStack() as stack:
        write_log(tmp_path / "log", "cars", STATES, [put_value("speed", b"cars:speed:1", b"9")])
        log = ("--log", tmp_path / "log")
        start("registry", *log, "--port", 0, "--replicas", 1).wait_for("started registry")
        zones = {}
        for number, zone in enumerate(("rack-a", "rack-a", "rack-b", "")):
            options = ("--port", 0, "--store", tmp_path / str(number), *(("--zone", zone) if zone else ()))
            found = start("state-server", *log, *options).wait_for(r"started state server @ (\S+:\d+)")
            zones[found[1]] = zone or "127.0.0.1"  # without a zone, the host is the zone
        url = stack.enter_context(page_of(f"redis://{next(iter(zones))}"))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=WAIT_S_MAX))

        def servers() -> dict[str, tuple[str, str]]:
            """Return the role and the zone of each server, by its address."""
            cells = r"<td><strong>(\S+)</strong></td><td>([^<]+)</td><td>([^<]+)</td>"
            return {address: (role, zone) for address, role, zone in re.findall(cells, client.get("/cluster").text)}

        eventually(lambda: {address: zone for address, (_, zone) in servers().items()} == zones, awaited="all zones")
        roles = eventually(servers, lambda found: sum(role != "master" for role, _ in found.values()) == 2, "replicas")
        for address, (role, _) in roles.items():
            if role != "master":
                assert zones[role.removeprefix("replica of ")] != zones[address]


@pytest.mark.skipif(not has_redis(), reason="there is no redis-server on the PATH")
def test_redis_server_can_be_shown_too(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, server.connect() as admin:
        admin.call("HSET", "user:1", "name", "<b>Ada</b>")
        with (
            page_of(f"redis://127.0.0.1:{server.port}") as url,
            httpx.Client(base_url=url, timeout=WAIT_S_MAX) as client,
        ):
            assert "The server refuses what this page needs" in client.get("/overview").text
            assert "user:1" in client.get("/browse").text
            assert "&lt;b&gt;Ada&lt;/b&gt;" in client.get(f"/key?key={quote('user:1')}").text


@pytest.mark.skipif(not has_redis(), reason="there is no redis-server on the PATH")
def test_proxy_shows_its_servers_and_its_shadow_comparisons(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "speeds"\nkeys = "job:speed:<car>"\nowner = "shadow"\n')
    with ExitStack() as stack:
        overlay = Overlay(tmp_path, stack)
        proxy = overlay.start_overlay("--routes", str(rules), is_ready=False)
        with proxy.connect() as reader:
            eventually(lambda: reader.call("GET", "dash/7/apdex").plain, lambda found: found == b"0.9")
            reader.call("GET", "job:speed:3")
            with overlay.upstream.connect() as upstream:
                upstream.call("SET", b"job:speed:\xff\n", "only there")
            reader.call("GET", b"job:speed:\xff\n")
        url = stack.enter_context(page_of(f"redis://127.0.0.1:{proxy.port}"))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=WAIT_S_MAX))
        shadow = eventually(
            lambda: client.get("/shadow").text,
            lambda found: "&#34;an old copy&#34;" in found and "&#34;only there&#34;" in found,
            "the differences",
        )
        assert "speeds" in shadow and "job:speed:3" in shadow
        assert r'href="/key?key=job%3Aspeed%3A%FF%0A"><code>job:speed:\xff\x0a</code>' in shadow
        cluster = eventually(lambda: client.get("/cluster").text, lambda found: found.count('class="badge live"') == 2)
        for port in overlay.ports:
            assert f"127.0.0.1:{port}" in cluster
        assert "16,384 of 16,384 slots have an owner" in cluster
        overlay.write_topology({"slots": "0-99"}, {"slots": "100-16383"})
        eventually(lambda: client.get("/cluster").text, lambda found: "slots 100 to 8,191" in found, "the move")
