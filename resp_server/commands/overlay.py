"""STATE OWNER, OWNERS, CONFIRM, RELEASE, RELOAD and SHADOW: the owners of keys at a proxy with an upstream."""

from __future__ import annotations

from resp_server.command.handler import OneOrMore, command
from resp_server.command.spec import argument, our_facts
from resp_server.pipeline.context import CommandContext
from resp_server.pipeline.proxy_context import OverlayControl
from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import Reply

O_FORMATS = "O(N) where N is the number of key formats"
FOR_ADMINS = (O_FORMATS, "admin noscript loading stale", "@admin @slow @dangerous")


@command(
    "state|owner",
    ours=our_facts(
        "O(N*M) where N is the number of keys, and M that of rules and key formats",
        "readonly loading stale",
        "@read @slow",
        # The arguments are names, not keys: no key is read, and no request is sent to a server.
        argument("key", "string", "multiple"),
    ),
)
def state_owner(context: CommandContext, *keys: OneOrMore) -> Reply:
    """Returns the owner of each key, its state, and what happens to writes, at a proxy with an upstream."""
    return _control(context).owner(keys, context.session.db)


@command("state|owners", ours=our_facts(O_FORMATS, "readonly loading stale", "@read @slow"))
def state_owners(context: CommandContext) -> Reply:
    """Lists the jobs that own keys, wait for a confirmation, or are released, at a proxy with an upstream."""
    return _control(context).owners()


@command("state|confirm", ours=our_facts(*FOR_ADMINS, argument("job")))
def state_confirm(context: CommandContext, job: bytes) -> Reply:
    """Gives the keys of a job that waits, or is released, to its states, at a proxy with an upstream."""
    return _control(context).confirm(job)


@command("state|release", ours=our_facts(*FOR_ADMINS, argument("job")))
def state_release(context: CommandContext, job: bytes) -> Reply:
    """Gives a job's keys back to the upstream, at a proxy with an upstream."""
    return _control(context).release(job)


@command("state|reload", ours=our_facts(*FOR_ADMINS))
def state_reload(context: CommandContext) -> Reply:
    """Reloads the rules file of a proxy with an upstream, and returns the number of rules."""
    return _control(context).reload()


@command("state|shadow", ours=our_facts(*FOR_ADMINS))
def state_shadow(context: CommandContext) -> Reply:
    """Lists what comparisons with the upstream have found for each rule, with samples, at a proxy with an upstream."""
    return _control(context).shadow()


def _control(context: CommandContext) -> OverlayControl:
    control = context.server.proxy.overlay_control
    if control is None:
        raise GenericError("this is no proxy with an upstream; only such a proxy has owners of keys")
    return control
