"""Generated support tickets of four kinds."""

import numpy as np
import pandas as pd

KINDS = {
    "delivery": ["parcel", "delivery", "courier", "shipment"],
    "billing": ["invoice", "refund", "payment", "credit card"],
    "login": ["password", "login", "account", "verification code"],
    "defect": ["broken screen", "dead battery", "cracked case", "faulty charger"],
}
SENTENCES = {
    "delivery": [
        "My {thing} has not arrived yet, it is {days} days late.",
        "The tracking page says that the {thing} left {days} days ago, but nothing came.",
        "Where is my {thing}? It was promised for {days} days ago.",
    ],
    "billing": [
        "There is a mistake with my {thing}: I was charged {days} times.",
        "I have been waiting {days} days for an answer about my {thing}.",
        "The amount of my {thing} is wrong, please correct it within {days} days.",
    ],
    "login": [
        "I cannot get into the site, my {thing} is not accepted since {days} days.",
        "The {thing} fails after {days} attempts.",
        "Please reset my {thing}, I have tried {days} times.",
    ],
    "defect": [
        "The device has a {thing} after {days} days of use.",
        "It came with a {thing}, and it is only {days} days old.",
        "After {days} days I noticed a {thing}; I want a replacement.",
    ],
}


def generate(rows, seed=0):
    """Return tickets with the columns ``id``, ``text`` and ``kind``.

    Parameters
    ----------
    rows : int
    seed : int

    Returns
    -------
    pandas.DataFrame
    """
    random = np.random.default_rng(seed)
    kinds = random.choice(list(KINDS), rows)
    texts = [
        str(random.choice(SENTENCES[kind])).format(
            thing=random.choice(KINDS[kind]), days=random.integers(2, 99)
        )
        for kind in kinds
    ]
    return pd.DataFrame({"id": np.arange(rows), "text": texts, "kind": kinds})
