"""What learners build and keep: small functions on top of torch alone, one module for each subject."""
