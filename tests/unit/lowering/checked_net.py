"""A forward with assert statements, in a file whose asserts pytest leaves as they are."""


def checked(self, x):
    assert (x < 100).all(), "large"
    assert (x > -100).all()
    return self.linear(x)
