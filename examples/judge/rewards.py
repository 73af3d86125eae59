"""The truth that the judge has learned to tell; its weight is 0, so it trains nothing."""


def fits(completion, row):
    return float(completion == ("good morning" if row["time"] < "12" else "good evening"))
