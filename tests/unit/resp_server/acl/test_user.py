"""Rules: their text, what they allow, their errors. `tests/differential/test_users.py` compares them with Redis."""

from __future__ import annotations

from hashlib import sha256

import pytest

from resp_server.acl.denial import Denial, Reason, denial_text
from resp_server.acl.selector import CATEGORIES, RuleError
from resp_server.acl.user import PARTS_MAX, RULES_BYTES_MAX, RULES_MAX, SELECTORS_MAX, User, merge_selectors
from resp_server.commands import command_table
from resp_server.protocol.glob import PATTERN_BYTES_MAX

TABLE = command_table()
START = "off sanitize-payload resetchannels -@all"
ENABLED = "on nopass sanitize-payload"
ONE = "#" + sha256(b"one").hexdigest()
TWO = "#" + sha256(b"two").hexdigest()
LONG = "a" * (PATTERN_BYTES_MAX + 1)

# Redis' texts.
SYNTAX = "Syntax error"
UNKNOWN = "Unknown command or category name in ACL"
BAD_HASH = "The password hash must be exactly 64 characters and contain only lowercase hexadecimal characters"
PATTERN_AFTER_ALL = (
    "Adding a pattern after the * pattern (or the '{}' flag) is not valid and does not have any effect. Try '{}' to "
    "start with an empty list of {}"
)


def user_of(rules: str) -> User:
    user = User(b"u", TABLE)
    user.apply_all(rules.encode().split())
    return user


def denial(user: User, line: str) -> Denial | None:
    words = line.encode().split()
    command = TABLE.get(words[0])
    assert command is not None
    if command.subcommands:
        command = TABLE.get(b"|".join(words[:2]))
        assert command is not None
    return user.denial(command, words)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("", START),
        ("on nopass", f"{ENABLED} resetchannels -@all"),
        ("ON OFF", START),
        ("skip-sanitize-payload", "off skip-sanitize-payload resetchannels -@all"),
        ("skip-sanitize-payload sanitize-payload", START),
        (">one >two >one", f"off sanitize-payload {ONE} {TWO} resetchannels -@all"),
        (f">one {TWO}", f"off sanitize-payload {ONE} {TWO} resetchannels -@all"),
        (">one >two <one", f"off sanitize-payload {TWO} resetchannels -@all"),
        (f">one >two !{TWO[1:]}", f"off sanitize-payload {ONE} resetchannels -@all"),
        ("nopass >one", f"off sanitize-payload {ONE} resetchannels -@all"),
        (">one nopass", "off nopass sanitize-payload resetchannels -@all"),
        (">one nopass resetpass", START),
        ("on >one ~a &b +get (+set) reset", START),
        ("on +set reset +get", f"{START} +get"),
        ("~a (+get) (+set ~b) clearselectors", "off sanitize-payload ~a resetchannels -@all"),
        ("~a %R~b %W~c %rw~d %WR~e", "off sanitize-payload ~a %R~b %W~c ~d ~e resetchannels -@all"),
        ("%R~a %W~a", "off sanitize-payload ~a resetchannels -@all"),
        ("%R~a~b", "off sanitize-payload %R~a~b resetchannels -@all"),
        ("~a allkeys", "off sanitize-payload ~* resetchannels -@all"),
        ("~* resetkeys ~a", "off sanitize-payload ~a resetchannels -@all"),
        ("%RW~*", "off sanitize-payload %RW~* resetchannels -@all"),
        ("%R~*", "off sanitize-payload %R~* resetchannels -@all"),
        ("&a &b &a", "off sanitize-payload resetchannels &a &b -@all"),
        ("&a allchannels", "off sanitize-payload &* -@all"),
        ("&* resetchannels &a", "off sanitize-payload resetchannels &a -@all"),
        ("allcommands", "off sanitize-payload resetchannels +@all"),
        ("+get +@all", "off sanitize-payload resetchannels +@all"),
        ("+@all -get nocommands", START),
        ("+get -get +GET", f"{START} +get"),
        ("+get +@read +get", f"{START} +@read +get"),
        ("+@READ -@Hash", f"{START} +@read -@hash"),
        ("+Config|GET", f"{START} +config|get"),
        ("+config|get +config", f"{START} +config"),
        ("+config -config|get", f"{START} +config -config|get"),
        ("+select|0 +select|1", f"{START} +select|0 +select|1"),
        ("(~a +get) (%R~b +@read)", f"{START} (~a resetchannels -@all +get) (%R~b resetchannels -@all +@read)"),
        ("(&* allkeys +@all)", f"{START} (~* &* +@all)"),
    ],
)
def test_rules_have_text_that_acl_file_has(rules: str, text: str) -> None:
    user = user_of(rules)
    assert user.text.decode() == text
    again = User.from_rule_lists(b"u", user.rule_lists, TABLE)
    assert again.text == user.text


@pytest.mark.parametrize(
    ("rules", "wrong", "error"),
    [
        ("nonsense", "nonsense", SYNTAX),
        ("+get nonsense +nothing", "nonsense", SYNTAX),
        ("+nothing", "+nothing", UNKNOWN),
        ("-nothing", "-nothing", UNKNOWN),
        ("+@nothing", "+@nothing", UNKNOWN),
        ("+config|nothing", "+config|nothing", UNKNOWN),
        ("+nothing|x", "+nothing|x", UNKNOWN),
        ("+get|", "+get|", SYNTAX),
        ("+config|get|x", "+config|get|x", "Allowing first-arg of a subcommand is not supported"),
        ("%~a", "%~a", SYNTAX),
        ("%X~a", "%X~a", SYNTAX),
        ("%RR~a", "%RR~a", SYNTAX),
        ("~a\0b", "~a\0b", SYNTAX),
        ("&a\0b", "&a\0b", SYNTAX),
        ("~* ~a", "~a", PATTERN_AFTER_ALL.format("allkeys", "resetkeys", "patterns")),
        ("&* &a", "&a", PATTERN_AFTER_ALL.format("allchannels", "resetchannels", "channels")),
        ("#abc", "#abc", BAD_HASH),
        ("!" + "A" * 64, "!" + "A" * 64, BAD_HASH),
        ("<two", "<two", "The password you are trying to remove from the user does not exist"),
        (f"~{LONG}", f"~{LONG}", "a pattern may have 1024 bytes"),
        (f"&{LONG}", f"&{LONG}", "a pattern may have 1024 bytes"),
        ("(~a nonsense )", "(~a nonsense )", SYNTAX),
    ],
)
def test_wrong_rule_is_error_and_changes_nothing(rules: str, wrong: str, error: str) -> None:
    user = user_of("on >one ~a +get (+set)")
    before = user.text
    with pytest.raises(RuleError) as raised:
        user.apply_all([b"off", *rules.encode().split(b" ")])
    assert str(raised.value) == f"Error in ACL SETUSER modifier '{wrong}': {error}"
    assert user.text == before


@pytest.mark.parametrize(
    ("rules", "start"), [("(+get", "(+get"), ("(~a (+get", "(~a"), ("(+get) (+set", "(+set"), ("(", "(")]
)
def test_unclosed_selector_is_error(rules: str, start: str) -> None:
    user = User(b"u", TABLE)
    with pytest.raises(RuleError) as raised:
        user.apply_all(rules.encode().split())
    assert str(raised.value) == f"Unmatched parenthesis in acl selector starting at '{start}'."


def test_rule_begins_with_one_of_signs_or_is_word() -> None:
    user = User(b"u", TABLE)
    for code in set(range(33, 127)) - set(b"+-~%&><#!()"):
        with pytest.raises(RuleError, match=f"^{SYNTAX}$"):
            user.apply(bytes((code,)) + b"x")


def test_pattern_may_have_1024_bytes() -> None:
    user = user_of(f"+@all ~{LONG[1:]} &{LONG[1:]}")
    assert denial(user, f"get {LONG[1:]}") is None and denial(user, f"publish {LONG[1:]} m") is None


def test_bytes_that_are_no_text_are_named_as_they_are() -> None:
    for rule in (b"\xffx", b"(\xffx"):
        with pytest.raises(RuleError) as raised:
            User(b"u", TABLE).apply_all([rule])
        assert rule in str(raised.value).encode("utf-8", "surrogateescape")


ALLOWED = None
COMMAND = Denial(Reason.COMMAND, 0)


@pytest.mark.parametrize(
    ("rules", "line", "expected"),
    [
        ("~*", "get a", COMMAND),
        ("~*", "hello", ALLOWED),  # before a login
        ("~* +get", "get a", ALLOWED),
        ("~* +get", "strlen a", COMMAND),
        ("~* +@all -get", "get a", COMMAND),
        ("~* +@all -get", "strlen a", ALLOWED),
        ("~* +@read", "get a", ALLOWED),
        ("~* +@read", "config get a", COMMAND),
        ("~* +@all -@read", "get a", COMMAND),
        ("~* +@all -@dangerous", "config get a", COMMAND),
        ("~* +@all -@dangerous", "client id", ALLOWED),
        ("~* +@dangerous", "client id", COMMAND),
        ("~* +@dangerous", "client kill x", ALLOWED),  # the container is not dangerous
        ("+config", "config get a", ALLOWED),
        ("+config|get", "config get a", ALLOWED),
        ("+config|get", "config set a b", COMMAND),
        ("+config -config|get", "config get a", COMMAND),
        ("+config -config|get", "config set a b", ALLOWED),
        ("+@all -config", "config get a", COMMAND),
        ("+select|0", "select 0", ALLOWED),
        ("+select|0", "select 1", COMMAND),
        ("+select|0", "select", COMMAND),
        ("+publish|A ~* &*", "publish a m", ALLOWED),
        ("+publish|A ~* &*", "publish A m", ALLOWED),
        ("+select|0 +select", "select 1", ALLOWED),
        ("+select|0 -select", "select 0", COMMAND),
        ("+select|0 -@all", "select 0", COMMAND),
        ("+@all ~a*", "get ab", ALLOWED),
        ("+@all ~a*", "get b", Denial(Reason.KEY, 1)),
        ("+@all ~a*", "mget a1 a2 b", Denial(Reason.KEY, 3)),
        ("+@all", "get a", Denial(Reason.KEY, 1)),
        ("+@all ~a ~b ~c", "mget c b a", ALLOWED),
        ("+@all ~* resetkeys", "get a", Denial(Reason.KEY, 1)),
        ("+@all %R~a", "get a", ALLOWED),
        ("+@all %W~a", "get a", Denial(Reason.KEY, 1)),
        ("+@all %R~a", "del a", Denial(Reason.KEY, 1)),
        ("+@all %W~a", "del a", ALLOWED),
        ("+@all %R~a", "set a 1", Denial(Reason.KEY, 1)),
        ("+@all %R~a", "getdel a", Denial(Reason.KEY, 1)),
        ("+@all %W~a", "getdel a", Denial(Reason.KEY, 1)),
        ("+@all %R~a %W~a", "getdel a", ALLOWED),
        ("+@all %R~a* %W~*a", "getdel a", Denial(Reason.KEY, 1)),  # one pattern has to allow both
        (f"+@all ~{'x' * 31}* ~{'y' * 32}*", f"get {'x' * 32}", ALLOWED),
        (f"+@all ~{'x' * 31}* ~{'y' * 32}*", f"get {'y' * 33}", ALLOWED),
        (f"+@all ~{'x' * 31}* ~{'y' * 32}*", f"get {'x' * 30}", Denial(Reason.KEY, 1)),
        (f"+@all ~{'x' * 40}* ~a", f"get {'x' * 41}", ALLOWED),
        (f"+@all ~{'x' * 40}* ~a", "get a", ALLOWED),
        (f"+@all ~{'x' * 40}* ~a", "get b", Denial(Reason.KEY, 1)),
        (f"+@all ~{'x' * 40}* ~{'y' * 40}*", f"get {'y' * 41}", ALLOWED),
        (f"+@all ~{'x' * 40}*", f"get {'x' * 39}", Denial(Reason.KEY, 1)),
        ("+@all &a*", "publish ab m", ALLOWED),
        ("+@all &a*", "publish b m", Denial(Reason.CHANNEL, 1)),
        ("+@all &a*", "subscribe a b", Denial(Reason.CHANNEL, 2)),
        ("+@all &a*", "psubscribe a*", ALLOWED),
        ("+@all &a*", "psubscribe ab", Denial(Reason.CHANNEL, 1)),  # only a rule's own pattern
        ("+@all allchannels", "psubscribe b*", ALLOWED),
        ("(+get ~a) (+strlen ~b)", "get a", ALLOWED),
        ("(+get ~a) (+strlen ~b)", "strlen b", ALLOWED),
        ("(+get ~a) (+strlen ~b)", "strlen a", Denial(Reason.KEY, 1)),
        ("(+get ~a) (+strlen ~b)", "ttl a", COMMAND),
        ("(+mget ~a ~b) (+mget ~c)", "mget a b c", Denial(Reason.KEY, 3)),  # the farthest of all selectors
        ("(+mget ~c) (+mget ~a ~b)", "mget a b c", Denial(Reason.KEY, 3)),
        ("(+@all ~* &*)", "publish a m", ALLOWED),
    ],
)
def test_request_is_allowed_if_selector_allows_all_of_it(rules: str, line: str, expected: Denial | None) -> None:
    user = user_of(rules)
    assert denial(user, line) == expected
    assert denial(User.from_rule_lists(b"u", user.rule_lists, TABLE), line) == expected
    copied = user.copy()
    assert denial(copied, line) == expected and copied.name == user.name


def test_changed_rules_apply_to_next_request() -> None:
    user = user_of("on nopass +@all ~a &x")
    assert denial(user, "get b") == Denial(Reason.KEY, 1) and denial(user, "publish y m") == Denial(Reason.CHANNEL, 1)
    assert not user.can_read(b"b") and not user.can_subscribe(b"y") and not user.is_unrestricted
    user.apply_all([b"~b", b"&y"])
    assert denial(user, "get b") is None and denial(user, "publish y m") is None
    assert user.can_read(b"b") and user.can_subscribe(b"y")
    user.apply_all([b"~*", b"&*"])
    assert user.is_unrestricted and user.reads_all_keys and user.read_patterns == [b"*"]
    user.apply_all([b"-get"])
    assert not user.is_unrestricted and user.reads_all_keys
    user.apply_all([b"resetkeys"])
    assert not user.can_read(b"b") and not user.reads_all_keys and user.read_patterns == []


def test_key_readable_by_any_command_is_visible() -> None:
    user = user_of("~a* %W~b* (%R~c* ~a*)")
    assert [user.can_read(key) for key in (b"a1", b"b1", b"c1", b"d1")] == [True, False, True, False]
    assert user.read_patterns == [b"a*", b"c*"]
    assert user_of("(%R~*)").reads_all_keys
    assert not user_of("%W~*").reads_all_keys


def test_pattern_may_be_subscribed_to_only_as_rule_has_it() -> None:
    user = user_of("&a* (&b)")
    assert [user.can_subscribe(name) for name in (b"ax", b"a*", b"b", b"c")] == [True, True, True, False]
    assert [user.can_subscribe(name, is_pattern=True) for name in (b"ax", b"a*", b"b")] == [False, True, True]


def test_login_needs_password_of_user_that_is_on() -> None:
    user = user_of("on >one >two")
    assert [user.accepts_password(word) for word in (b"one", b"two", b"three", b"")] == [True, True, False, False]
    assert not user.is_open
    user.apply_all([b"nopass"])
    assert user.is_open and user.accepts_password(b"anything")
    user.apply_all([b"off"])
    assert not user.is_open and not user.accepts_password(b"anything")


def test_one_setuser_takes_limited_number_of_rules() -> None:
    user = User(b"u", TABLE)
    user.apply_all([b"~%d" % number for number in range(RULES_MAX)])
    for words in ([b"on"] * (RULES_MAX + 1), [b"(" + b"+get " * RULES_MAX + b"+get)"], [b"~" + b"a" * RULES_BYTES_MAX]):
        with pytest.raises(RuleError, match=r"^ACL SETUSER takes 512 rules of 64 KiB at once; send several of them$"):
            user.apply_all(words)
    user.apply_all([b">" + b"a" * (RULES_BYTES_MAX - 1)])


def test_user_has_limited_number_of_patterns_passwords_and_selectors() -> None:
    refused = r"^a user may have 1024 patterns and passwords, and 64 selectors; this one would have more$"
    user = User(b"u", TABLE)
    user.apply_all([b"~%d" % number for number in range(500)])
    user.apply_all([b"&%d" % number for number in range(500)])
    user.apply_all([b">%d" % number for number in range(PARTS_MAX - 1002)] + [b"(~a", b"&b)"])
    with pytest.raises(RuleError, match=refused):
        user.apply_all([b">more"])
    user.apply_all([b"resetpass"] + [b"(+get)"] * (SELECTORS_MAX - 2))
    with pytest.raises(RuleError, match=refused):
        user.apply_all([b"(+get)"])


def test_categories_are_those_of_commands() -> None:
    commands = [each for command in TABLE for each in (command, *command.subcommands.values())]
    assert {name for each in commands for name in each.facts.acl_categories} == {f"@{each}" for each in CATEGORIES}


def test_words_of_selector_are_one_rule() -> None:
    words = [b"on", b"(~a", b"+get", b"&b)", b"(+set)", b"off", b"(", b"+get", b")"]
    assert merge_selectors(words) == [b"on", b"(~a +get &b)", b"(+set)", b"off", b"( +get )"]


def test_selector_may_have_quotes_and_open_quote_makes_it_empty() -> None:
    user = User(b"u", TABLE)
    user.apply(b"(~\"a\" '+get')")
    user.apply(b'(~"a +get)')
    assert user.text.decode() == f"{START} (~a resetchannels -@all +get) (resetchannels -@all)"


@pytest.mark.parametrize(
    ("reason", "denied", "text"),
    [
        (Reason.COMMAND, None, "User u\udcff has no permissions to run the 'get' command"),
        (Reason.COMMAND, b"k", "User u\udcff has no permissions to run the 'get' command"),
        (Reason.KEY, None, "No permissions to access a key"),
        (Reason.KEY, b"k\xff", "User u\udcff has no permissions to access the 'k\udcff' key"),
        (Reason.CHANNEL, None, "No permissions to access a channel"),
        (Reason.CHANNEL, b"c", "User u\udcff has no permissions to access the 'c' channel"),
    ],
)
def test_denial_has_text_of_redis(reason: Reason, denied: bytes | None, text: str) -> None:
    assert denial_text(reason, b"u\xff", "get", denied) == text
