"""Sentence embeddings with all-MiniLM-L6-v2, once as the model stands and once under a strategy.

    python -m examples.minilm [FILE] [--strategy=nanoflow] [--micro_batches=2] [--batch=8]

``model.py``    the encoder: plain Flax Linen, with a ``df.mark`` around each operator
``weights.py``  where the published weights lie, and how their names map onto the model's
``text.py``     a file, its sentences, their word pieces, batches of those
``embed.py``    batches through the model, a fair timing, the closest pairs
``__main__.py`` the command line: both ways side by side
"""
