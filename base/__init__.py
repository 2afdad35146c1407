"""The ground floor: small tools that several rooms need.  Imports nothing of ours."""
