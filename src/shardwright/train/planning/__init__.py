"""Programs of jobs, and measurements of the machine that they run on: all that a plan of memory and time needs.

`programs` goes from a configuration to the program of its steps, on `absent_data` in place of a dataset. For
`shardwright calibrate`, `measuring` runs the operations and steps of `small_jobs` on all ranks, and `measured_device`
makes tables of times and figures of a device from their measurements. `imported_device` takes such tables from a
package. No command is here, and nothing is printed.
"""
