"""What does a mixed cluster train under each system?"""
