// Package users tests that work is its user's: on a real cluster whose agents run as root, tasks have exactly the ids, groups and
// files of the user who submitted them, and other users of the machine see no secrets; and the whole cluster runs without root.
// It makes a temporary user and therefore needs root; otherwise it is skipped with that reason.
package users
