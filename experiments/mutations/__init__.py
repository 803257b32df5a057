"""Do the tests notice if one line of the library is wrong?"""
