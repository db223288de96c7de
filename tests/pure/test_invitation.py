"""Invitations: what a line means, and what a user reads who has pasted half of one."""

from __future__ import annotations

import socket
import ssl
import sys

import pytest
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from unisono.cli.looking import as_invitation
from unisono.cli.reach import find, may_act, tell
from unisono.cluster.machine import headprocess
from unisono.cluster.machine.headprocess import Service, welcome_words
from unisono.cluster.trust.certificate import Untrusted, check, derived
from unisono.cluster.trust.invitation import HeadUrl, Invitation, shown
from unisono.cluster.trust.secret import is_reader, reader_token
from unisono.core.errors import UsageError
from unisono.core.messages import Stop
from unisono.core.policy import Policy
from unisono.core.settings import RunSettings
from unisono.system.interfaces import Interface, interfaces, is_local
from unisono.system.tasks import TAKEN
from unisono.views.watch.terminal import PlainTerminal, terminal

FINGERPRINT = "0123456789abcdef" * 4
HOSTS = st.sampled_from(["lab", "node-7.cluster.example", "10.0.0.1", "fd00::2", "fe80::1%eth0"])
TOKENS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)


@given(HOSTS, st.integers(1, 65535), st.booleans(), TOKENS)
def test_a_line_says_what_it_was_made_from(host: str, port: int, is_secure: bool, token: str) -> None:
    url = HeadUrl(host, port, is_secure, FINGERPRINT if is_secure else "")
    invitation = Invitation(str(url), token)
    assert Invitation.parse(invitation.line) == invitation
    assert Invitation.parse(f" {invitation.line!r}\n") == invitation, "pasted with its quotes"
    assert HeadUrl.parse(invitation.url) == url


def test_the_form_of_an_invitation() -> None:
    """It stands in the documentation, and other programs make it."""
    invitation = Invitation.parse(f"wss://tok-EN_1@[fd00::2]:4000#{FINGERPRINT}")
    assert (invitation.token, invitation.url) == ("tok-EN_1", f"wss://[fd00::2]:4000#{FINGERPRINT}")
    assert HeadUrl.parse(invitation.url) == HeadUrl("fd00::2", 4000, True, FINGERPRINT)
    assert invitation.command == f"unisono join - <<< 'wss://tok-EN_1@[fd00::2]:4000#{FINGERPRINT}'"
    assert Invitation.parse("ws://t@lab:4000").url == "ws://lab:4000"


def test_a_fingerprint_may_be_in_capital_letters() -> None:
    assert HeadUrl.parse(f"wss://lab:4000#{FINGERPRINT.upper()}").fingerprint == FINGERPRINT


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the address of a run is ws://HOST:PORT or wss://HOST:PORT#FINGERPRINT, got ''"),
        ("http://token@lab:80", "got 'http://lab:80'"),
        ("wss://token@lab", "the port is a number from 1 to 65535"),
        ("wss://token@lab:0", "the port is a number from 1 to 65535"),
        ("wss://token@lab:70000", "the port is a number from 1 to 65535"),
        (f"wss://token@lab:4000#{FINGERPRINT[:-1]}", "has 64 hexadecimal digits, this one 63 characters"),
        (f"wss://token@lab:4000#{FINGERPRINT[:-1]}x", "has 64 hexadecimal digits"),
        (f"ws://token@lab:4000#{FINGERPRINT}", "so the URL begins with wss://"),
        (f"wss://lab:4000#{FINGERPRINT}", "the invitation has no token: wss://lab:4000 is where the head listens"),
        (f"wss://@lab:4000#{FINGERPRINT}", "the invitation has no token"),
        ("wss://token@lab:4000 and more", "got 'wss://lab:4000 and more'"),
        ("wss://tok%0Aen@lab:4000", "characters that no token has"),
    ],
)
def test_what_is_no_invitation_is_refused_in_words_without_the_token(text: str, why: str) -> None:
    with pytest.raises(UsageError) as raised:
        Invitation.parse(text)
    assert why in str(raised.value)
    assert "token@" not in str(raised.value)


def test_what_is_printed_of_an_invitation_is_not_secret() -> None:
    invitation = Invitation(f"wss://lab:4000#{FINGERPRINT}", "token")
    assert "token" not in repr(invitation)
    assert shown(invitation.url) == "wss://lab:4000"
    assert b"PRIVATE" in derived("token").pem
    assert "PRIVATE" not in repr(derived("token"))


def test_whoever_has_the_token_has_the_same_certificate() -> None:
    """Also with another version of the libraries that make it: machines of one run need not have the same."""
    assert derived("token") == derived("token")
    assert derived("token").fingerprint == "0149d15f5c2ddf685fccf709d456f3a22bc24b0089e043ada62f17822019cc80"
    assert derived("another").fingerprint != derived("token").fingerprint


def test_the_key_of_a_certificate_is_one_that_browsers_take_and_its_own_signature_is_right() -> None:
    certificate = x509.load_der_x509_certificate(der_of("token"))
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)
    certificate.verify_directly_issued_by(certificate)


def test_where_no_certificate_can_be_made_the_user_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise UnsupportedAlgorithm("deterministic signing is not supported")

    monkeypatch.setattr(x509.CertificateBuilder, "sign", refuse)
    with pytest.raises(UsageError, match=r"OpenSSL before 3\.2.*--set certificate and --set private-key"):
        derived("token")


# -- those who look only -----------------------------------------------------------------------------


def test_the_token_for_looking_is_the_same_on_every_machine_and_does_not_give_away_the_other_one() -> None:
    assert reader_token("token") == "r-7fbfd6fcf1ab2b0b7354cad5b9cc3c8f"
    assert reader_token("another") != reader_token("token")
    assert is_reader(reader_token("token"))
    assert not is_reader("token")
    assert not is_reader("r-token")


def test_an_invitation_says_for_whom_it_is() -> None:
    invitation = Invitation(f"wss://lab:4000#{FINGERPRINT}", "token")
    looking = invitation.for_looking
    assert (invitation.is_for_looking, looking.is_for_looking) == (False, True)
    assert (looking.url, looking.token) == (invitation.url, reader_token("token"))
    assert looking.for_looking == looking == Invitation.parse(looking.line)
    assert looking.command == f"unisono watch - <<< '{looking.line}'"
    assert invitation.page == looking.page == f"https://lab:4000/?token={looking.token}#{FINGERPRINT}"
    assert Invitation("ws://127.0.0.1:4000", "token").page.startswith("http://127.0.0.1:4000/?token=r-")


@pytest.mark.parametrize("host", ["lab", "10.0.0.1", "fd00::2"])
@pytest.mark.parametrize("fingerprint", [derived("token").fingerprint, ""], ids=["TLS", "in the clear"])
def test_who_has_the_address_of_the_page_can_watch_in_a_terminal(host: str, fingerprint: str) -> None:
    invitation = Invitation(str(HeadUrl(host, 4000, bool(fingerprint), fingerprint)), "token")
    found = find(as_invitation(invitation.page))
    assert found == invitation.for_looking
    if fingerprint:
        check(der_of("token"), HeadUrl.parse(found.url), found.token)


def test_half_an_address_of_the_page_is_refused_in_words_that_help() -> None:
    half = Invitation(f"wss://lab:4000#{FINGERPRINT}", "token").page.partition("#")[0]
    found = find(as_invitation(half))
    with pytest.raises(Untrusted, match=r"lacks the fingerprint .* `unisono watch --once RUN` shows"):
        check(der_of("token"), HeadUrl.parse(found.url), found.token)


def test_with_a_line_for_looking_nobody_joins_or_ends_a_run() -> None:
    looking = Invitation("ws://127.0.0.1:9", "token").for_looking
    with pytest.raises(UsageError, match="this line is only for watching the run"):
        may_act(looking)
    with pytest.raises(UsageError, match="this line is only for watching the run"):
        tell(looking, Stop(reason="enough"))
    assert may_act(Invitation("ws://127.0.0.1:9", "token")).token == "token"


def test_who_looks_goes_by_the_fingerprint_of_the_line_alone() -> None:
    """All who look have the same token, and could make the certificate that would belong to it."""
    reader = reader_token("token")
    check(der_of("token"), HeadUrl("lab", 4000, True, derived("token").fingerprint), reader)
    for certificate, fingerprint in ((der_of(reader), FINGERPRINT), (der_of(reader), ""), (der_of("token"), "")):
        with pytest.raises(Untrusted):
            check(certificate, HeadUrl("lab", 4000, True, fingerprint), reader)


def test_a_certificate_is_that_of_the_invitation_or_that_of_the_token() -> None:
    der = der_of("token")
    plain = HeadUrl("lab", 4000, True)
    check(der, plain, "token")
    check(der, HeadUrl("lab", 4000, True, derived("token").fingerprint), "another")
    check(der, HeadUrl("lab", 4000, True, FINGERPRINT), "token")  # the next head is elsewhere
    for certificate, url, token in ((der, plain, "another"), (None, plain, "token"), (b"", plain, "token")):
        with pytest.raises(Untrusted, match=r"the process at wss://lab:4000 is not the head of this run"):
            check(certificate, url, token)


def der_of(token: str) -> bytes:
    pem = derived(token).pem.decode()
    return ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERTIFICATE-----") :])


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("lab", False)],
)
def test_addresses_of_this_machine_only(host: str, local: bool) -> None:
    assert is_local(host) is local


class Terminal:
    def __init__(self, is_one: bool) -> None:
        self._is_one = is_one

    def isatty(self) -> bool:
        return self._is_one


POLICY = Policy(start=1, maximum=1)


@pytest.mark.parametrize("is_one", [True, False])
def test_the_line_is_shown_on_a_terminal_and_written_into_no_file(
    is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", Terminal(is_one))
    monkeypatch.setattr("sys.stderr", Terminal(False))
    invitation = Invitation(f"wss://10.0.0.1:4000#{FINGERPRINT}", "token")
    words, *more = welcome_words(invitation, Service(policy=POLICY, bind="10.0.0.1"), "runs/a run")
    assert more == [f"watch it in a browser: {invitation.page}"] * is_one
    assert (f"other machines join with: {invitation.command}" in words) is is_one
    assert ("the line that `unisono watch --once 'runs/a run'` shows" in words) is not is_one


TASKS = [
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"},
    {TAKEN: "Slurm"},
]


@pytest.mark.parametrize("task", TASKS, ids=["Open MPI", "MPICH", "a task of a run"])
def test_the_terminal_of_a_task_is_no_persons(task: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI gives task 0 a pseudo-terminal; what is written there goes into the job's output, which others read."""
    monkeypatch.setenv("TERM", "xterm")
    for stream in ("sys.stdout", "sys.stderr"):
        monkeypatch.setattr(stream, Terminal(True))
    invitation = Invitation(f"wss://10.0.0.1:4000#{FINGERPRINT}", "the-token")
    service = Service(policy=POLICY, bind="10.0.0.1")
    assert len(welcome_words(invitation, service, "runs/a")) == 2
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    (words,) = welcome_words(invitation, service, "runs/a")
    assert invitation.token not in words
    assert isinstance(terminal(), PlainTerminal)


def test_a_run_that_only_this_machine_can_reach_invites_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    invitation = Invitation("ws://127.0.0.1:4000", "token")
    assert welcome_words(invitation, Service(policy=POLICY), "") == []
    monkeypatch.setattr("sys.stdout", Terminal(True))
    assert welcome_words(invitation, Service(policy=POLICY), "") == [f"watch it in a browser: {invitation.page}"]


@pytest.mark.parametrize(
    ("bind", "advertise", "named"),
    [("0.0.0.0", "", "10.9.9.9 (ib0)"), ("0.0.0.0", "lab.example", ""), ("10.0.0.1", "", "")],
)
def test_where_an_address_was_chosen_the_others_are_named(
    bind: str, advertise: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headprocess, "interfaces", lambda: [Interface("ib0", "10.9.9.9"), Interface("ib0", "fd00::9")])
    service = Service(policy=POLICY, bind=bind, settings=RunSettings(advertise=advertise))
    (words,) = welcome_words(Invitation("ws://10.0.0.1:4000", "token"), service, "")
    assert ("--set advertise=HOST names another" in words) is bool(named)
    assert named in words
    assert "fd00::9" not in words, "the head listens by IPv4"


def test_an_address_of_this_machine_is_told_to_others_where_there_is_no_default_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(probe: socket.socket, address: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(headprocess, "interfaces", lambda: [Interface("ib0", "10.9.9.9")])
    assert headprocess.reachable("0.0.0.0") == "10.9.9.9"


def test_the_interfaces_of_this_machine_are_those_that_the_system_lists() -> None:
    if sys.platform != "linux":
        return
    names = {name for _, name in socket.if_nameindex()}
    found = interfaces()
    assert {each.name for each in found} <= names
    assert not [each for each in found if is_local(each.address)]
    for each in found:
        family = socket.AF_INET6 if ":" in each.address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((each.address, 0))  # only an address of this machine can be bound


@pytest.mark.parametrize(
    ("bind", "tls", "expected"),
    [
        ("127.0.0.1", None, False),
        ("127.0.0.2", None, False),
        ("localhost", None, False),
        ("0.0.0.0", None, True),
        ("127.0.0.1", True, True),
        ("0.0.0.0", False, False),
    ],
)
def test_a_head_that_others_can_reach_speaks_tls(bind: str, tls: bool | None, expected: bool) -> None:
    service = Service(policy=POLICY, bind=bind, settings=RunSettings(tls=tls))
    with headprocess.listen(service) as listener:
        identity = service.identity(listener, "token")
        assert (identity is not None) is expected
        url = headprocess.url_of(service, listener, identity)
    assert url.is_secure is expected
    assert url.fingerprint == (derived("token").fingerprint if expected else "")
