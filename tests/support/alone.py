"""A group without ranks that could be lost: what a communication hook asks of the group of its model."""


class Alone:
    is_broken, member = False, "of one"
    result = staticmethod(lambda future: future.result())


ALONE = Alone()
