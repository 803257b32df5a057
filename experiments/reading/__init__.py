"""Can a reader say from the code alone who waits for whom?"""
