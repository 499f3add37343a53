// Package upgrade replaces the processes of a running cluster by another build, one at a time and under load, and goes back, for
// every release that Muster ever had. The file "releases" names them: name, commit, and feature level, one a line. Each is
// built from its commit into .cache; a release that cannot be built any more fails the test.
package upgrade
