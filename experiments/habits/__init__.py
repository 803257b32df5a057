"""Do habits of people who read no documentation give what one process gives, or say why not?"""
