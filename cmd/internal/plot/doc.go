// Package plot draws a curve in a terminal: dots of Braille patterns, four rows and two columns of them in each character cell.
// It is pure: numbers in, text out. The demo uses it.
package plot
