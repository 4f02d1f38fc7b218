//! One test per bug that was found and fixed, named by what went wrong. None yet.
