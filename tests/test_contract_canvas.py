"""What every decode leaves behind: commits that replay to the output, progress, nothing masked (contracts 5, 8)."""

import jax
import numpy as np
import pytest
from methods_table import (
    EVERYONE,
    FAMILIES,
    GEN_LENGTH,
    KEYS,
    ONE_PER_FORWARD,
    RAGGED,
    case_fixture,
    decode_once,
    decoder,
    lets_mask_win,
    lively_params,
    pad,
    ragged_prompts,
)

from polestar_jax import Reason
from polestar_jax.types import NO_FORWARD, REVOKED

case = case_fixture()


def replayed(output, mask_id: int):
    """Tokens and what is filled after every forward, `[T + 1, B, G]`, from the log alone."""
    canvases, planes = [np.full(output.tokens.shape, mask_id)], [np.zeros(output.tokens.shape, bool)]
    for forward in range(output.log.kind.shape[1]):
        token = output.log.token[:, forward]
        canvases.append(np.where(token >= 0, token, np.where(token == REVOKED, mask_id, canvases[-1])))
        planes.append((planes[-1] | (token >= 0)) & (token != REVOKED))
    return np.stack(canvases), np.stack(planes)


def test_log_replays_to_the_output(case):
    family, name = case
    output = decode_once(family, name, EVERYONE, RAGGED)
    canvases, filled = replayed(output, FAMILIES[family].config.mask_id)
    np.testing.assert_array_equal(output.log.token >= 0, output.log.reason != Reason.NONE)
    np.testing.assert_array_equal(canvases[-1], output.tokens)
    np.testing.assert_array_equal(filled[-1], output.filled)


def test_logs_have_no_holes(case):
    family, name = case
    output = decode_once(family, name, EVERYONE, RAGGED)
    spent = np.arange(output.log.kind.shape[1]) < output.forwards[:, None]
    np.testing.assert_array_equal(output.log.kind != NO_FORWARD, spent)
    assert (output.log.rows[spent] > 0).all() and (output.log.rows_executed[spent] >= output.log.rows[spent]).all()
    for field in ("rows", "rows_executed", "computed", "reason"):
        assert not getattr(output.log, field)[~spent].any()
    assert (output.log.token[~spent] == -1).all() and np.isnan(output.log.drift[~spent]).all()


def test_decode_ends_with_everything_filled(case):
    family, name = case
    decode, config = decoder(family, name), FAMILIES[family].config
    for seed in (1, 3):  # with the weights of seed 3 [MASK] is often the likeliest token
        output = decode_once(family, name, EVERYONE, RAGGED, params_seed=seed)
        assert (output.forwards <= decode.method.schedule.max_forwards(GEN_LENGTH)).all()
        assert output.filled.all() or lets_mask_win(decode)
        np.testing.assert_array_equal(output.tokens != config.mask_id, output.filled)
        assert ((output.tokens >= 0) & (output.tokens < config.vocab_size)).all()


def test_every_forward_makes_progress(case):
    family, name = case
    decode = decoder(family, name)
    if not decode.method.rule.progresses or lets_mask_win(decode):
        pytest.skip("the rule does not promise it")
    output = decode_once(family, name, EVERYONE, RAGGED)
    _, filled = replayed(output, FAMILIES[family].config.mask_id)
    net = np.diff(filled.sum(axis=2), axis=0).T
    assert (net[output.log.kind != NO_FORWARD] >= 1).all()


def test_one_token_per_step_takes_g_forwards(case):
    """Also with a head so large that confidences are 1.0 and tie."""
    family, name = case
    if name not in ONE_PER_FORWARD:
        pytest.skip("no numbers make it commit one token per forward")
    decode = decoder(family, name, **ONE_PER_FORWARD[name])
    lively = lively_params(FAMILIES[family], 1)
    for params in (lively, lively | {"head": jax.tree.map(lambda leaf: leaf * 1e4, lively["head"])}):
        output, _ = decode(params, decode.init(KEYS, RAGGED), pad(ragged_prompts(family), RAGGED))
        np.testing.assert_array_equal(output.forwards, GEN_LENGTH)
        assert output.filled.all()
        np.testing.assert_array_equal((output.log.token >= 0).sum(axis=2), 1)
