"""The mutual proof of the cluster's token."""

import hashlib
import hmac

import pytest

from wire.errors import Unauthenticated
from wire.trust.identity import NONCE_BYTES, PROOF_BYTES, Handshake, is_equal

NONCE = b"n" * NONCE_BYTES
HANDSHAKE = Handshake(b"the token", client=b"reader", server=b"server")


def test_both_sides_prove_that_they_know_the_token() -> None:
    answer, wanted = HANDSHAKE.answer(NONCE)
    assert len(answer) == NONCE_BYTES + PROOF_BYTES
    assert is_equal(HANDSHAKE.reply(NONCE, answer), wanted)


def test_a_proof_is_the_hmac_of_a_role_and_both_nonces() -> None:
    answer, wanted = HANDSHAKE.answer(NONCE)
    nonces = NONCE + answer[:NONCE_BYTES]
    assert answer[NONCE_BYTES:] == hmac.digest(b"the token", b"server" + nonces, hashlib.sha256)
    assert wanted == hmac.digest(b"the token", b"reader" + nonces, hashlib.sha256)


def test_a_server_draws_a_nonce_for_each_client() -> None:
    assert HANDSHAKE.answer(NONCE)[0] != HANDSHAKE.answer(NONCE)[0]


@pytest.mark.parametrize("place", [0, NONCE_BYTES, -1])
def test_a_client_takes_no_answer_with_a_wrong_byte(place: int) -> None:
    answer = bytearray(HANDSHAKE.answer(NONCE)[0])
    answer[place] ^= 1
    with pytest.raises(Unauthenticated, match="the server does not know the cluster's token"):
        HANDSHAKE.reply(NONCE, bytes(answer))


@pytest.mark.parametrize("other", [Handshake(b"another token", b"reader", b"server"), Handshake(b"", b"", b"")])
def test_a_client_with_another_token_is_refused_and_refuses(other: Handshake) -> None:
    with pytest.raises(Unauthenticated):
        other.reply(NONCE, HANDSHAKE.answer(NONCE)[0])
    _, wanted = HANDSHAKE.answer(NONCE)
    assert not is_equal(other.answer(NONCE)[1], wanted)


def test_a_servers_proof_sent_back_is_no_proof() -> None:
    answer, wanted = HANDSHAKE.answer(NONCE)
    assert not is_equal(answer[NONCE_BYTES:], wanted)


@pytest.mark.parametrize("length", [0, NONCE_BYTES, NONCE_BYTES + PROOF_BYTES - 1, NONCE_BYTES + PROOF_BYTES + 1])
def test_an_answer_of_another_length_proves_nothing(length: int) -> None:
    answer, _ = HANDSHAKE.answer(NONCE)
    with pytest.raises(Unauthenticated):
        HANDSHAKE.reply(NONCE, (answer + b"\0")[:length])
