"""How much memory does it take to read a Hugging Face folder by plan, and to write it again?"""
