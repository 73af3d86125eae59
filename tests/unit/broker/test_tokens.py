"""Lease tokens."""

from broker.delivery.lease_tokens import POOL_TOKENS, TOKEN_BYTES, Tokens


def test_tokens_are_random_hexadecimal_and_never_the_same() -> None:
    first, second = Tokens(), Tokens()
    made = [source() for _ in range(3 * POOL_TOKENS) for source in (first, second)]
    assert len(set(made)) == len(made)
    assert {len(bytes.fromhex(token)) for token in made} == {TOKEN_BYTES}
    ones = sum(bin(int(token, 16)).count("1") for token in made) / len(made)
    assert abs(ones - 4 * TOKEN_BYTES) < 1, "half of the bits of random tokens are ones"
