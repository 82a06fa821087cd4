"""From one request to a plan: where it leads, what it asks, how its body must be edited for that.

One reader per place where a model can be named; the API's row says which. Nothing here chooses an endpoint or takes
anything: the same plan serves live requests and `explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias
from urllib.parse import parse_qs

import msgspec

from extproc.config.generations import Generation, Space, Target
from extproc.request import encodings
from extproc.request.apis import Api, ModelIn, canonical, path_of, response_id
from extproc.request.parsing import (
    Parsed,
    Stored,
    model_edits,
    no_model,
    parse_body,
    parse_form,
    request_steps,
    to_request,
)
from extproc.request.splice import Splice, apply, insert_field
from extproc.request.steps import Steps
from extproc.request.stored import PREFIX, StoredResponses
from extproc.request.usage import AskedBy, ask_for_usage
from policies.types import InferenceRequest, Reason, Refusal

_INVALID: Final = "invalid_request_error"
_FORM: Final = ModelIn.FORM  # every request asks: by the enum each takes ten times as long
_JSON: Final = ModelIn.JSON
_PATH: Final = ModelIn.PATH
_LONGEST_MODEL: Final = 256
"""As the config takes them: a longer one cannot be served, and must not fill a log."""


@dataclass(init=False)
class Read:
    """What was found in a body, never changed: all of a plan that takes time in proportion to its length.

    It holds under the generation it was read by. `plain`: the body as it was before the client compressed it.
    """

    generation: Generation
    plain: bytes
    parsed: Parsed
    target: Target
    request: InferenceRequest

    def __init__(
        self,
        generation: Generation,
        plain: bytes,
        parsed: Parsed,
        target: Target,
        request: InferenceRequest,
    ) -> None:
        self.generation = generation
        self.plain = plain
        self.parsed = parsed
        self.target = target
        self.request = request


@dataclass(init=False)
class Incoming:
    """One request as it came, under the id we gave it; never changed.

    `read`: what was found in its body, if it was read before, by the generation that plans it now. `tenant`: whose it
    is; None where everybody may call.
    """

    api: Api
    headers: Mapping[str, str]
    body: bytes
    request_id: str
    read: Read | Refusal | None
    tenant: str | None

    def __init__(
        self,
        api: Api,
        headers: Mapping[str, str],
        body: bytes,
        request_id: str,
        read: Read | Refusal | None = None,
        tenant: str | None = None,
    ) -> None:
        self.api = api
        self.headers = headers
        self.body = body
        self.request_id = request_id
        self.read = read
        self.tenant = tenant


@dataclass(init=False)
class Plan:
    """What to do with a request, short of an endpoint; never changed.

    `response_id`: the answer may be asked for again by this id. `usage_asked_by`: who asked a stream for its usage,
    where that is our business.
    """

    target: Target
    request: InferenceRequest
    splices: tuple[Splice, ...]
    remove_headers: tuple[str, ...]
    response_id: str | None
    usage_asked_by: AskedBy | None

    def __init__(
        self,
        target: Target,
        request: InferenceRequest,
        splices: tuple[Splice, ...] = (),
        remove_headers: tuple[str, ...] = (),
        response_id: str | None = None,
        usage_asked_by: AskedBy | None = None,
    ) -> None:
        self.target = target
        self.request = request
        self.splices = splices
        self.remove_headers = remove_headers
        self.response_id = response_id
        self.usage_asked_by = usage_asked_by


def make_plan(generation: Generation, stored: StoredResponses, incoming: Incoming) -> Plan | Refusal:
    """Read the request. A Refusal for one that leads nowhere, or where its tenant sees nothing."""
    space, model_in = generation.space_of(incoming.tenant), incoming.api.model_in
    plan: Plan | Refusal
    if model_in is _JSON or model_in is _FORM:
        plan = _from_body(generation, space, stored, incoming)
    else:
        plan = _WITHOUT_BODY[model_in](generation, space, stored, incoming)
    if space.pools is None or isinstance(plan, Refusal):
        return plan
    if space.sees(plan.target):
        plan.request.policy = space.policies.get(plan.target.pool_name)
        return plan
    if model_in is _PATH:
        return unknown_path(path_of(incoming.headers))
    return unknown_model(plan.request.asked_model)


# -- a body that names its model


def _read_body(generation: Generation, space: Space, incoming: Incoming) -> Read | Refusal:
    """Read a body that names its model."""
    headers, plain = incoming.headers, incoming.body
    if "content-encoding" in headers:
        inflated = plain_body(generation, headers, plain)
        if isinstance(inflated, Refusal):
            return inflated
        plain = inflated
    parsed = _parse(generation, space, incoming, plain)
    if isinstance(parsed, Refusal):
        return parsed
    target = space.targets[parsed.model]
    request = to_request(parsed, target.model, target.rates, session_key=_session(headers))
    return Read(generation, plain, parsed, target, request)


def read_steps(generation: Generation, incoming: Incoming, plain: bytes) -> Steps[Read | Refusal]:
    """Read it in steps of a millisecond or two, but for the decoder's, which cannot be cut."""
    space = generation.space_of(incoming.tenant)
    parsed = _parse(generation, space, incoming, plain)
    yield
    if isinstance(parsed, Refusal):
        return parsed
    target = space.targets[parsed.model]
    request = yield from request_steps(parsed, target.model, target.rates, session_key=_session(incoming.headers))
    return Read(generation, plain, parsed, target, request)


def _parse(generation: Generation, space: Space, incoming: Incoming, plain: bytes) -> Parsed | Refusal:
    """The body's fields; a refusal also where its model leads nowhere."""
    if incoming.api.model_in is _FORM:
        form = incoming.headers.get("content-type", "")
        parsed = parse_form(incoming.api, form, plain, space.default_model)
    else:
        parsed = parse_body(incoming.api, plain, space.default_model, generation.bounds)
    return unknown_model(parsed.model) if isinstance(parsed, Parsed) and parsed.model not in space.targets else parsed


def _read_before(read: Read | Refusal) -> Read | Refusal:
    """What was read of it before. A plan has a request of its own to change."""
    if isinstance(read, Refusal):
        return read
    return Read(read.generation, read.plain, read.parsed, read.target, replace(read.request))


def _from_body(generation: Generation, space: Space, stored: StoredResponses, incoming: Incoming) -> Plan | Refusal:
    read = _read_body(generation, space, incoming) if incoming.read is None else _read_before(incoming.read)
    if isinstance(read, Refusal):
        return read
    plain, parsed, target, request = read.plain, read.parsed, read.target, read.request
    if generation.bounds is not None or parsed.stored is not None:
        refusal = _judge_parsed(generation, stored, incoming, parsed, request)
        if refusal is not None:
            return replace(refusal, asked_model=parsed.model)
    own_id: str | None = None
    asked_by: AskedBy | None = None
    edits = model_edits(plain, parsed, target.model)
    said = parsed.stored
    if said is not None:
        _stay_with_previous(request, said.previous_id, stored, incoming.tenant)
        if said.wanted:
            own_id = said.own_id or PREFIX + incoming.request_id
            if said.own_id is None:
                edits += (insert_field(plain, "request_id", msgspec.json.encode(own_id)),)
    if space.injects_usage:
        usage = ask_for_usage(plain, parsed)
        if usage is not None:
            edits += usage.splices
            asked_by = usage.by
    if not edits or plain is incoming.body:
        return Plan(target, request, edits, response_id=own_id, usage_asked_by=asked_by)
    # what was compressed goes on as it came, unless it has to be changed
    whole = (Splice(0, len(incoming.body), apply(plain, edits)),)
    return Plan(target, request, whole, ("content-encoding",), own_id, asked_by)


def _judge_parsed(
    generation: Generation, stored: StoredResponses, incoming: Incoming, parsed: Parsed, request: InferenceRequest
) -> Refusal | None:
    """Whether a request that could be read may go on."""
    too_long = None if generation.bounds is None else generation.bounds.judge_tokens(request.input_tokens)
    if too_long is not None or parsed.stored is None:
        return too_long
    return _judge_stored(parsed.stored, stored, incoming.tenant)


def encoding_of(headers: Mapping[str, str]) -> str:
    """The body's content-encoding; empty for none."""
    said = headers.get("content-encoding")
    if said is None:
        return ""
    encoding = said.strip().lower()
    return "" if encoding == "identity" else encoding


def plain_body(generation: Generation, headers: Mapping[str, str], body: bytes) -> bytes | Refusal:
    """The body as it was before the client compressed it; the very same object if it did not."""
    if not encoding_of(headers):
        return body
    try:
        return encodings.inflate(body, generation.largest_body_bytes)
    except encodings.TooLarge:
        return too_large(generation)
    except encodings.Corrupt as error:
        message = f"the body is not {encoding_of(headers)}, as its content-encoding says: {error}"
        return Refusal(415, _INVALID, message, Reason.UNSUPPORTED_ENCODING)


def _session(headers: Mapping[str, str]) -> str | None:
    return headers.get("x-pointsman-session") or headers.get("x-session-id")


def _judge_stored(said: Stored, stored: StoredResponses, tenant: str | None) -> Refusal | None:
    """Engines know no tenants: one that names another's answer, to go on from it or to take it over, stops here.

    With tenants an answer must be known as the tenant's own. One that is unknown may be anybody's: we forget. So
    nobody may name his own answers either, or he would claim a forgotten one by its name.
    """
    if tenant is not None and said.previous_id and stored.find(said.previous_id, tenant) is None:
        return _unknown_response(said.previous_id, "previous_response_id")
    if tenant is not None and said.own_id:
        message = "request_id is the gateway's to choose where it tells tenants apart; leave it out"
        return Refusal(400, _INVALID, message, Reason.INVALID_REQUEST, "request_id")
    return None


def _stay_with_previous(
    request: InferenceRequest, previous_id: str | None, stored: StoredResponses, tenant: str | None
) -> None:
    """An answer that goes on from another needs the engine that has the other."""
    previous = stored.find(previous_id, tenant) if previous_id else None
    if previous is not None and previous.model == request.model and previous.flight.served_by:
        request.subset = (previous.flight.served_by,)


# -- no body that names a model


def _from_query(_: Generation, space: Space, _stored: StoredResponses, incoming: Incoming) -> Plan | Refusal:
    query = incoming.headers.get(":path", "").partition("?")[2]
    named = parse_qs(query, max_num_fields=_MOST_QUERY_FIELDS, errors="replace").get("model", [""])[0]
    model = named or space.default_model
    if not model:
        return no_model()
    target = space.targets.get(model)
    return unknown_model(model) if target is None else Plan(target, _bare_request(incoming, model, target))


_MOST_QUERY_FIELDS: Final = 100


def _from_path(generation: Generation, _: Space, _stored: StoredResponses, incoming: Incoming) -> Plan | Refusal:
    target = generation.target_of_path(canonical(path_of(incoming.headers)), incoming.headers)
    if target is None:
        return unknown_path(path_of(incoming.headers))
    return Plan(target, _bare_request(incoming, target.model, target))


def _from_response_id(generation: Generation, _: Space, stored: StoredResponses, incoming: Incoming) -> Plan | Refusal:
    asked = response_id(path_of(incoming.headers))
    made = stored.find(asked, incoming.tenant)
    target = None if made is None else generation.targets.get(made.model)
    if made is None or made.flight.served_by is None or target is None:
        return _unknown_response(asked, "response_id")
    request = _bare_request(incoming, made.model, target)
    request.subset = (made.flight.served_by,)
    return Plan(target, request)


_NOTHING: Final = memoryview(b"")


def _bare_request(incoming: Incoming, asked_model: str, target: Target) -> InferenceRequest:
    """A request of which the body, if any, says nothing to us."""
    nothing = Parsed(incoming.api.kind, asked_model, _NOTHING)
    return to_request(nothing, target.model, target.rates, session_key=_session(incoming.headers))


_Reader: TypeAlias = Callable[[Generation, Space, StoredResponses, Incoming], Plan | Refusal]
_WITHOUT_BODY: Final[dict[ModelIn, _Reader]] = {
    ModelIn.QUERY: _from_query,
    ModelIn.PATH: _from_path,
    ModelIn.RESPONSE_ID: _from_response_id,
}


# -- refusals


def too_large(generation: Generation) -> Refusal:
    """The body, or what it inflates to, is beyond the limit."""
    limit = generation.largest_body_bytes
    return Refusal(413, _INVALID, f"the body is larger than {limit} bytes", Reason.BODY_TOO_LARGE)


def unknown_path(path: str) -> Refusal:
    """Neither an API nor an operator's rule."""
    return Refusal(404, _INVALID, f"no such path: {path[:200]}", Reason.UNKNOWN_PATH)


def _unknown_response(response_id: str, param: str) -> Refusal:
    message = f"no response with id '{response_id[:200]}' is known here"
    return Refusal(404, _INVALID, message, Reason.UNKNOWN_RESPONSE, param)


def unknown_model(model: str) -> Refusal:
    """A name that leads nowhere, or nowhere for its tenant."""
    message = f"The model `{model[:200]}` does not exist or is not served here"
    return Refusal(404, _INVALID, message, Reason.UNKNOWN_MODEL, "model", asked_model=model[:_LONGEST_MODEL])
