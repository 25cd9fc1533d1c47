"""placeholder"""


class Search:
    pass
