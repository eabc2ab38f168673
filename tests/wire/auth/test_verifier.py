"""Tokens: which are believed, which are not, and what is remembered of them."""

import asyncio
import base64
import hashlib
import hmac
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from penstock.config.schema import Auth
from penstock.errors import ConfigError, Forbidden, Unauthorized, Unavailable
from penstock.metrics import Metrics
from penstock.wire.auth import Identity, Role, Verifier, keys
from penstock.wire.auth.verifier import UnknownKey, bearer
from tests.support.tokens import (
    AUDIENCE,
    ISSUER,
    SECRET,
    claims_of,
    jwk,
    pem,
    private_key,
    provider,
    signed,
    token,
)


def verifier(**settings: Any) -> Verifier:
    settings = {
        "secret": SECRET,
        "issuer": ISSUER,
        "audience": AUDIENCE,
        "clock_skew": 0.0,
        **settings,
    }
    return Verifier(Auth(enabled=True, **settings), Metrics())


def refusal(of: Verifier, text: str) -> str:
    with pytest.raises(Unauthorized) as caught:
        of.identify(text)
    return str(caught.value)


def test_a_token_says_who_what_role_and_until_when():
    result = verifier(clock_skew=30.0).identify(token("read-write", "alice", lifetime=100))
    assert (result.subject, result.role) == ("alice", Role.READ_WRITE)
    assert result.expires == pytest.approx(time.time() + 130, abs=5)


@pytest.mark.parametrize("kind", ["RS256", "ES256", "EdDSA"])
def test_public_keys_verify_what_their_private_keys_signed(kind, tmp_path):
    made = signed(claims_of("read-only"), private_key(kind), kind)
    assert (
        verifier(public_key=pem(private_key(kind)), secret="").identify(made).role == Role.READ_ONLY
    )
    file = tmp_path / "key.pem"
    file.write_text(pem(private_key(kind)))
    assert verifier(public_key=str(file)).identify(made).subject == "alice"
    written_out = pem(private_key(kind)).replace(
        "\n", "\\n"
    )  # as environment variables often hold it
    assert (
        verifier(public_key=written_out, algorithm=kind.lower()).identify(made).subject == "alice"
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lifetime": -1}, "The token has expired"),
        ({"lifetime": None}, "The token lacks the claim 'exp'"),
        ({"nbf": time.time() + 3600}, "The token is not valid yet"),
        ({"aud": "another"}, "The token is for another audience"),
        ({"aud": None}, "The token lacks the claim 'aud'"),
        ({"iss": "https://evil.test"}, "The token is from another issuer"),
        ({"iss": None}, "The token lacks the claim 'iss'"),
        ({"subject": 7}, "The token cannot be verified"),
    ],
)
def test_claims_that_do_not_fit_are_refused_with_the_reason(changes, text):
    assert refusal(verifier(), token(**changes)) == text


def test_what_is_not_signed_by_our_key_is_refused():
    checked = verifier(public_key=pem(private_key("RS256")))
    assert (
        refusal(checked, signed(claims_of(), "x" * 40, "HS256")) == "The token's signature is wrong"
    )
    assert (
        refusal(checked, signed(claims_of(), private_key("RS256", 1), "RS256"))
        == "The token's signature is wrong"
    )
    assert (
        refusal(checked, signed(claims_of(), None, "none"))
        == "The token's algorithm 'none' is not accepted"
    )
    assert (
        refusal(checked, signed(claims_of(), SECRET * 2, "HS512"))
        == "The token's algorithm 'HS512' is not accepted"
    )
    good = token()
    head, body, signature = good.split(".")
    forged = (
        base64.urlsafe_b64encode(json.dumps(claims_of("admin", "mallory")).encode())
        .decode()
        .rstrip("=")
    )
    assert refusal(checked, f"{head}.{forged}.{signature}") == "The token's signature is wrong"
    assert refusal(checked, f"{head}.{body}.") == "The token's signature is wrong"
    for nonsense in ("x", "a.b.c", "..", "é", "Basic", f"{head}.{body}"):
        assert refusal(checked, nonsense).startswith("The token"), nonsense
    assert refusal(checked, "a" * 20_000) == "The token is longer than 16384 bytes"
    assert refusal(checked, "").startswith("Authentication required")


def test_the_text_of_a_public_key_is_no_secret():
    """The classic: HS256 with the published key as the secret."""
    public = pem(private_key("RS256"))
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=")
    body = base64.urlsafe_b64encode(json.dumps(claims_of()).encode()).rstrip(b"=")
    mac = base64.urlsafe_b64encode(
        hmac.new(public.encode(), head + b"." + body, hashlib.sha256).digest()
    ).rstrip(b"=")
    forged = b".".join((head, body, mac)).decode()
    assert (
        refusal(verifier(public_key=public, secret=""), forged)
        == "The token's algorithm 'HS256' is not accepted"
    )
    assert refusal(verifier(public_key=public), forged) == "The token's signature is wrong"


def test_issuer_audience_and_exp_are_optional_when_the_configuration_says_so():
    relaxed = verifier(issuer="", audience="", require_exp=False)
    result = relaxed.identify(token(aud="whoever", iss=None, lifetime=None))
    assert result.expires == math.inf


@pytest.mark.parametrize(
    ("claims", "role"),
    [
        ({"role": "admin"}, Role.ADMIN),
        ({"role": None, "roles": ["read-only", "read-write"]}, Role.READ_WRITE),
        ({"role": "read-only", "roles": ["other", "admin"]}, Role.ADMIN),
        ({"role": ["read-write"]}, Role.READ_WRITE),
        ({"role": "root", "roles": ["", 3, None]}, Role.PUBLIC),
        ({"role": None, "roles": {"admin": True}}, Role.PUBLIC),
        ({"role": None}, Role.PUBLIC),
    ],
)
def test_the_highest_role_of_both_claims_counts(claims, role):
    assert verifier().identify(token(**claims)).role == role


def test_roles_may_have_other_names_and_lie_inside_other_claims():
    named = verifier(role_read_write="worker", roles_array_claim="realm_access.roles")
    assert named.identify(token(None, realm_access={"roles": ["worker"]})).role == Role.READ_WRITE
    assert named.identify(token(None, realm_access="worker")).role == Role.PUBLIC
    with pytest.raises(Forbidden, match="needs the role read-write; the token has read-only"):
        Identity("x", Role.READ_ONLY).require(Role.READ_WRITE)
    with pytest.raises(Forbidden, match="has no known role"):
        Identity("x", Role.PUBLIC).require(Role.READ_ONLY)


def test_a_known_token_is_not_verified_again_and_never_outlives_its_expiry(monkeypatch):
    checked, good = verifier(), token(lifetime=50)
    first = checked.identify(good)
    assert checked.identify(good) is first, "verified again"
    later = time.time() + 51
    monkeypatch.setattr(time, "time", lambda: later)
    assert checked.identify(good) is not first


def test_what_is_remembered_is_bounded_and_the_expired_go_first():
    checked = verifier(cache_size=3)
    checked.identities["stale"] = Identity("x", Role.ADMIN, time.time() - 1)
    made = [token(subject=f"s{number}") for number in range(4)]
    for each in made[:3]:
        checked.identify(each)
    assert list(checked.identities) == made[:3]
    checked.identify(made[3])
    assert list(checked.identities) == made[1:]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"secret": "short"}, "at least 32 bytes"),
        ({"secret": ""}, "needs a key to verify tokens"),
        ({"algorithm": "rs256"}, "needs a key to verify tokens"),
        ({"public_key": "/nowhere.pem"}, "neither a public key"),
        ({"public_key": "-----BEGIN PUBLIC KEY-----\nx"}, "neither a public key"),
        ({"public_key": pem(rsa.generate_private_key(65537, 1024))}, "1024 bits is too short"),
        ({"public_key": pem(private_key("EdDSA")), "algorithm": "rs256"}, "a key for EdDSA"),
    ],
)
def test_keys_that_cannot_be_used_are_told_at_start(settings, text):
    with pytest.raises(ConfigError, match=text):
        verifier(**settings)


def test_the_header_may_lack_the_word_bearer_and_other_schemes_are_no_tokens():
    assert bearer("Bearer abc") == bearer("bearer  abc ") == bearer("abc") == "abc"
    assert bearer("Basic abc") == bearer(None) == bearer("") == ""
    assert bearer(None, "x=1&access_token=abc") == "abc"
    assert bearer("Bearer abc", "access_token=other") == "abc"


# -- keys that are fetched
# --------------------------------------------------------------------------------------------


@asynccontextmanager
async def fetching(*published: dict[str, Any], **settings: Any) -> AsyncIterator[Any]:
    with provider(*published) as source:
        checked = verifier(secret="", jwks_url=source.url, **settings)
        await checked.keys.start()
        try:
            yield checked, source
        finally:
            await checked.keys.stop()


async def test_a_published_key_verifies_by_its_id_and_others_in_the_set_are_passed_over():
    symmetric = {
        "kty": "oct",
        "kid": "symmetric",
        "k": base64.urlsafe_b64encode(b"k" * 40).decode(),
    }
    async with fetching(
        jwk("RS256", "RS256"),
        jwk("ES256", "ES256"),
        jwk("EdDSA", "EdDSA"),
        jwk("RS256", "to encrypt", 1, use="enc"),
        symmetric,
        {"kty": "unheard of"},
        "nonsense",
    ) as (checked, _):
        for kind in ("RS256", "ES256", "EdDSA"):
            made = signed(claims_of(subject=kind), private_key(kind), kind, kid=kind)
            assert checked.identify(made).subject == kind
        nameless = signed(claims_of(), private_key("RS256"), "RS256")
        assert checked.identify(nameless).subject == "alice"
        with pytest.raises(Unauthorized, match="algorithm 'HS256'"):
            checked.identify(signed(claims_of(), "k" * 40, "HS256", kid="symmetric"))


async def test_a_new_key_is_asked_for_once_and_a_withdrawn_one_is_forgotten(monkeypatch):
    async with fetching(jwk("EdDSA", "old")) as (checked, source):
        old = signed(claims_of(), private_key("EdDSA"), "EdDSA", kid="old")
        new = signed(claims_of(), private_key("EdDSA", 1), "EdDSA", kid="new")
        checked.identify(old)
        monkeypatch.setattr(keys, "UNKNOWN_KEY_SECONDS", 0.0)
        source.keys = [jwk("EdDSA", "new", 1)]
        with pytest.raises(UnknownKey):
            checked.identify(new)
        assert all(
            result.subject == "alice"
            for result in await asyncio.gather(*[checked.learn(new) for _ in range(5)])
        )
        assert source.asked == 2  # at start, and once for all five
        monkeypatch.setattr(keys, "UNKNOWN_KEY_SECONDS", 10.0)
        assert refusal(checked, old) == "The token is signed with a key that is not known here"
        for number in range(20):  # keys that strangers make up are not asked for again and again
            refusal(
                checked, signed(claims_of(), private_key("EdDSA"), "EdDSA", kid=f"made up {number}")
            )
        assert source.asked == 2


async def test_when_the_provider_fails_the_keys_stay_and_before_it_ever_answered_it_is_503(
    monkeypatch,
):
    made = signed(claims_of(), private_key("EdDSA"), "EdDSA", kid="one")

    with provider() as source:
        source.fails = True
        checked = verifier(secret="", jwks_url=source.url)
        await checked.keys.start()
        with pytest.raises(Unavailable, match="could not be fetched"):
            checked.identify(made)
        monkeypatch.setattr(keys, "UNKNOWN_KEY_SECONDS", 0.0)
        source.fails, source.keys = False, [jwk("EdDSA", "one")]
        with pytest.raises(UnknownKey):
            checked.identify(made)
        assert (await checked.learn(made)).subject == "alice"
        source.fails = True
        await checked.keys.refresh()
        assert checked.identify(made).subject == "alice"
        source.fails, source.keys = False, {"not": "a list"}  # type: ignore[assignment]
        await checked.keys.refresh()
        checked.identities.clear()
        assert checked.identify(made).subject == "alice"
        await checked.keys.stop()


async def test_a_key_set_may_be_a_file(tmp_path):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [jwk("EdDSA", "one")]}))

    checked = verifier(secret="", jwks_url=str(file))
    await checked.keys.start()
    assert (
        checked.identify(signed(claims_of(), private_key("EdDSA"), "EdDSA", kid="one")).role
        == Role.ADMIN
    )
    await checked.keys.stop()
